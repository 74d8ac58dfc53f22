#include <cmath>

#include "areas.hpp"
#include "arrays.hpp"
#include "machine.hpp"
#include "threads.hpp"

namespace leafsum {
namespace {

py::array rms_norm(const py::array& x, const py::array& weight, double eps, bool one_plus_weight) {
  if (x.ndim() < 1) fail_value("x", "at least one axis", "shape []");
  const int64_t size = x.shape(x.ndim() - 1);
  if (size < 1) fail_value("x", "at least one element a row", "N = 0");
  NormArgs args{};
  args.x = read_flat<float>("x", x);
  const bool is_grouped = weight.ndim() == 2;
  args.weight = is_grouped ? read<float>("weight", weight, {{"groups"}, {"N", size}})
                           : read<float>("weight", weight, {{"N", size}});
  args.num_groups = is_grouped ? weight.shape(0) : 1;
  if (args.num_groups < 1 || x.size() / size % args.num_groups != 0) {
    fail_value("x", "rows in whole groups of " + std::to_string(args.num_groups), std::to_string(x.size() / size));
  }
  args.eps = static_cast<float>(eps);
  args.one_plus_weight = one_plus_weight;
  args.size = size;
  py::array_t<float> out = new_array<float>(shape_of(x));
  args.out = out.mutable_data();
  const int64_t num_rows = x.size() / size;
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_rows(num_rows, 0.5 * args.size, [&](int64_t row) { set.rms_norm(args, row); });
  });
  return out;
}

py::array gated_norm(const py::array& x, const py::array& gate, const py::array& weight, double eps,
                     const std::string& activation) {
  if (x.ndim() < 1) fail_value("x", "at least one axis", "shape []");
  GatedNormArgs args{};
  args.size = x.shape(x.ndim() - 1);
  if (args.size < 1) fail_value("x", "at least one element a row", "N = 0");
  args.x = read_flat<float>("x", x);
  args.gate = read_like("gate", gate, "x", x);
  args.weight = read<float>("weight", weight, {{"N", args.size}});
  args.eps = static_cast<float>(eps);
  if (activation != "silu" && activation != "sigmoid") fail_value("activation", "silu or sigmoid", activation);
  args.activation = activation == "silu" ? Gate::silu : Gate::sigmoid;
  py::array_t<float> out = new_array<float>(shape_of(x));
  args.out = out.mutable_data();
  const int64_t num_rows = x.size() / args.size;
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_rows(num_rows, 2.5 * args.size, [&](int64_t row) { set.gated_norm(args, row); });
  });
  return out;
}

py::array rotary(const py::array& x, const py::array& positions, const py::array& frequencies,
                 double attention_factor) {
  RotaryArgs args{};
  args.x = read<float>("x", x, {{"M"}, {"heads"}, {"D"}});
  const int64_t num_rows = x.shape(0);
  args.num_heads = x.shape(1);
  args.head_dim = x.shape(2);
  args.positions = read<int32_t>("positions", positions, {{"M", num_rows}});
  args.frequencies = read<float>("frequencies", frequencies, {{"R/2"}});
  args.num_frequencies = frequencies.shape(0);
  if (2 * args.num_frequencies > args.head_dim) {
    fail_value("frequencies", "at most D/2 = " + std::to_string(args.head_dim / 2),
               std::to_string(args.num_frequencies));
  }
  args.attention_factor = static_cast<float>(attention_factor);
  py::array_t<float> out = new_array<float>(shape_of(x));
  args.out = out.mutable_data();
  without_gil([&] {
    const Kernels& set = kernels();
    const double row_ns = 10.0 * args.num_frequencies + 0.5 * args.num_heads * args.head_dim;
    parallel_rows(num_rows, row_ns,
                  [&](int64_t row) { set.rotary(args, row, thread_scratch(2 * args.num_frequencies)); });
  });
  return out;
}

py::tuple router(const py::array& logits, int64_t top_k, bool renormalise) {
  RouterArgs args{};
  args.logits = read<float>("logits", logits, {{"M"}, {"E"}});
  args.num_experts = logits.shape(1);
  if (top_k < 1 || top_k > args.num_experts) {
    fail_value("top_k", "1 to E = " + std::to_string(args.num_experts), std::to_string(top_k));
  }
  args.top_k = top_k;
  args.renormalise = renormalise;
  const int64_t num_rows = logits.shape(0);
  py::array_t<int32_t> ids = new_array<int32_t>({num_rows, top_k});
  py::array_t<float> weights = new_array<float>({num_rows, top_k});
  args.ids = ids.mutable_data();
  args.weights = weights.mutable_data();
  without_gil([&] {
    const Kernels& set = kernels();
    const double row_ns = args.num_experts * (4 + 0.2 * top_k);
    parallel_rows(num_rows, row_ns, [&](int64_t row) { set.router(args, row, thread_scratch(3 * args.num_experts)); });
  });
  return py::make_tuple(ids, weights);
}

py::tuple argmax(const py::array& logits) {
  ArgmaxArgs args{};
  args.logits = read<float>("logits", logits, {{"M"}, {"V"}});
  args.size = logits.shape(1);
  if (args.size < 1) fail_value("logits", "at least one column", "V = 0");
  const int64_t num_rows = logits.shape(0);
  py::array_t<float> values = new_array<float>({num_rows});
  py::array_t<int32_t> ids = new_array<int32_t>({num_rows});
  args.values = values.mutable_data();
  args.ids = ids.mutable_data();
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_rows(num_rows, 0.2 * args.size, [&](int64_t row) { set.argmax(args, row); });
  });
  return py::make_tuple(values, ids);
}

py::array nonfinite_rows(const py::array& x) {
  NonfiniteArgs args{};
  args.x = read<float>("x", x, {{"M"}, {"N"}});
  args.size = x.shape(1);
  const int64_t num_rows = x.shape(0);
  py::array_t<bool> out = new_array<bool>({num_rows});
  args.out = out.mutable_data();
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_rows(num_rows, 0.1 * args.size, [&](int64_t row) { set.nonfinite(args, row); });
  });
  return out;
}

py::array residual_hash(const py::array& x, const py::array& positions) {
  HashArgs args{};
  args.x = read<float>("x", x, {{"M"}, {"H"}});
  args.size = x.shape(1);
  const int64_t num_rows = x.shape(0);
  args.positions = read<int32_t>("positions", positions, {{"M", num_rows}});
  py::array_t<uint64_t> out = new_array<uint64_t>({num_rows});
  args.out = out.mutable_data();
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_rows(num_rows, 1.5 * args.size, [&](int64_t row) { set.residual_hash(args, row); });
  });
  return out;
}

}  // namespace

void register_rows(py::module_& module) {
  module.def("rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("one_plus_weight"));
  module.def("gated_norm", &gated_norm, py::arg("x"), py::arg("gate"), py::arg("weight"), py::arg("eps"),
             py::arg("activation"));
  module.def("rotary", &rotary, py::arg("x"), py::arg("positions"), py::arg("frequencies"),
             py::arg("attention_factor"));
  module.def("router", &router, py::arg("logits"), py::arg("top_k"), py::arg("renormalise"));
  module.def("argmax", &argmax, py::arg("logits"));
  module.def("nonfinite_rows", &nonfinite_rows, py::arg("x"));
  module.def("residual_hash", &residual_hash, py::arg("x"), py::arg("positions"));
}

}  // namespace leafsum
