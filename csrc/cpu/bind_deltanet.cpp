#include <algorithm>
#include <memory>

#include "areas.hpp"
#include "arrays.hpp"
#include "machine.hpp"
#include "runs.hpp"
#include "threads.hpp"

namespace leafsum {
namespace {

constexpr int64_t CHANNELS_PER_TASK = 1024;
constexpr double CHANNEL_NS = 2.0;  // Of a few taps and a sigmoid.

py::array causal_conv(const py::array& x, const py::array& weight, int64_t dilation, py::array ring,
                      const py::array& row_order, const py::array& run_slots, const py::array& run_starts,
                      const py::array& run_ends) {
  ConvArgs args{};
  args.x = read<float>("x", x, {{"M"}, {"C"}});
  args.num_channels = x.shape(1);
  args.weight = read<float>("weight", weight, {{"taps"}, {"C", args.num_channels}});
  args.num_taps = weight.shape(0);
  if (dilation < 1) fail_value("dilation", "1 or more", std::to_string(dilation));
  args.dilation = dilation;
  float* kept = write<float>("ring", ring, {{"slots"}, {"ring_rows"}, {"C", args.num_channels}});
  args.ring = kept;
  args.ring_rows = ring.shape(1);
  // Divided, as a product with any dilation could leave 64 bits.
  if (args.ring_rows < 1 || (args.num_taps > 1 && dilation > (args.ring_rows - 1) / (args.num_taps - 1))) {
    fail_value("ring", "more than (taps - 1) * dilation rows", std::to_string(args.ring_rows));
  }
  const Runs runs(row_order, run_slots, run_starts, run_ends, x.shape(0), ring.shape(0));
  py::array_t<float> out = new_array<float>(shape_of(x));
  args.out = out.mutable_data();
  without_gil([&] {
    const Kernels& set = kernels();
    const std::unique_ptr<float[]> zeros(new float[args.num_channels]());
    args.zeros = zeros.get();
    const int64_t pieces = (args.num_channels + CHANNELS_PER_TASK - 1) / CHANNELS_PER_TASK;
    const double task_ns = CHANNEL_NS * std::min(args.num_channels, CHANNELS_PER_TASK);
    parallel_for(runs.num_rows() * pieces, task_ns, [&](int64_t task) {
      const int64_t begin = task % pieces * CHANNELS_PER_TASK;
      const int64_t end = std::min(args.num_channels, begin + CHANNELS_PER_TASK);
      const RunRow row = runs.row(task / pieces);
      set.conv(args, row.run, row.index, begin, end);
    });
    keep_in_ring(runs, args.x, args.num_channels, args.ring_rows, kept);
  });
  return out;
}

// Value columns of a task: whole heads where there are tasks enough for all threads, parts of them otherwise.
int64_t columns_per_task(const DeltaNetArgs& args, int64_t num_runs) {
  const int64_t heads = std::max<int64_t>(1, num_runs * args.num_heads);
  const int64_t parts = (num_threads() + heads - 1) / heads;
  return std::min(DELTANET_COLUMNS, padded((args.value_dim + parts - 1) / parts, COLUMNS_PER_BLOCK));
}

void run_deltanet(DeltaNetArgs args, const float* a_log, const Runs& runs) {
  const Kernels& set = kernels();
  const int64_t num_rows = runs.num_rows(), num_keys = args.num_key_heads * args.key_dim;
  const std::unique_ptr<float[]> q(new float[num_rows * num_keys]), k(new float[num_rows * num_keys]);
  const std::unique_ptr<float[]> beta(new float[num_rows * args.num_heads]), sums(new float[num_rows * args.num_heads]);
  const std::unique_ptr<float[]> rates(new float[args.num_heads]);
  set.apply(Function::exp, a_log, rates.get(), args.num_heads);
  for (int64_t h = 0; h < args.num_heads; ++h) rates[h] = -rates[h];
  args.q = q.get();
  args.k = k.get();
  args.beta = beta.get();
  args.sums = sums.get();
  args.rates = rates.get();
  parallel_rows(num_rows, 1.5 * num_keys + 20.0 * args.num_heads,
                [&](int64_t row) { set.deltanet_prepare(args, row); });
  for (const Run& run : runs.all()) set.deltanet_sums(args, run);
  const int64_t columns = columns_per_task(args, static_cast<int64_t>(runs.all().size()));
  const int64_t parts = (args.value_dim + columns - 1) / columns, scratch = deltanet_scratch(args.key_dim, columns);
  const int64_t per_run = args.num_heads * parts;
  const double step_ns = 0.05 * columns * (2.0 * args.key_dim + 2 * ROWS_PER_BORDER);
  parallel_for(static_cast<int64_t>(runs.all().size()) * per_run,
               step_ns * num_rows / std::max<size_t>(1, runs.all().size()), [&](int64_t task) {
                 const int64_t begin = task % parts * columns;
                 set.deltanet(args, runs.all()[task / per_run], task % per_run / parts, begin,
                              std::min(columns, args.value_dim - begin), thread_scratch(scratch));
               });
  parallel_for(static_cast<int64_t>(runs.all().size()), 2.0 * num_keys,
               [&](int64_t run) { set.deltanet_keep(args, runs.all()[run]); });
}

py::array deltanet(const py::array& qkv, const py::array& b, const py::array& a, const py::array& a_log,
                   const py::array& dt_bias, const py::array& key_index, py::array states, py::array keys,
                   py::array updates, py::array decays, const py::array& row_order, const py::array& run_slots,
                   const py::array& run_starts, const py::array& run_ends, double scale, const std::string& dtype) {
  DeltaNetArgs args{};
  args.dtype = parse_dtype(dtype);
  args.states = write<float>("states", states, {{"slots"}, {"borders", 2}, {"Hv"}, {"Dk"}, {"Dv"}});
  const int64_t num_slots = states.shape(0), num_rows = qkv.ndim() > 0 ? qkv.shape(0) : 0;
  args.num_heads = states.shape(2);
  args.key_dim = states.shape(3);
  args.value_dim = states.shape(4);
  if (args.value_dim < 1) fail_value("states", "at least one value column", "Dv = 0");
  const Axis slots{"slots", num_slots}, heads{"Hv", args.num_heads}, ring{"ring_rows", 2 * ROWS_PER_BORDER};
  args.keys = write_storage("keys", keys, args.dtype,
                            {slots, {"borders", 2}, {"Hk"}, {"Dk", args.key_dim}, {"rows", ROWS_PER_BORDER}});
  args.num_key_heads = keys.shape(2);
  args.updates = write<float>("updates", updates, {slots, ring, heads, {"Dv", args.value_dim}});
  args.decays = write<float>("decays", decays, {slots, ring, heads});
  args.row_size = 2 * args.num_key_heads * args.key_dim + args.num_heads * args.value_dim;
  args.qkv = read<float>("qkv", qkv, {{"M"}, {"2*Hk*Dk + Hv*Dv", args.row_size}});
  args.b = read<float>("b", b, {{"M", num_rows}, heads});
  args.a = read<float>("a", a, {{"M", num_rows}, heads});
  const float* logs = read<float>("a_log", a_log, {heads});
  args.dt_bias = read<float>("dt_bias", dt_bias, {heads});
  args.key_index = read<int32_t>("key_index", key_index, {heads});
  check_range("key_index", args.key_index, args.num_heads, 0, args.num_key_heads - 1);
  args.scale = static_cast<float>(scale);
  const Runs runs(row_order, run_slots, run_starts, run_ends, num_rows, num_slots);
  py::array_t<float> out = new_array<float>({num_rows, args.num_heads, args.value_dim});
  args.out = out.mutable_data();
  without_gil([&] { run_deltanet(args, logs, runs); });
  return out;
}

}  // namespace

void register_deltanet(py::module_& module) {
  module.def("causal_conv", &causal_conv, py::arg("x"), py::arg("weight"), py::arg("dilation"), py::arg("ring"),
             py::arg("row_order"), py::arg("run_slots"), py::arg("run_starts"), py::arg("run_ends"));
  module.def("deltanet", &deltanet, py::arg("qkv"), py::arg("b"), py::arg("a"), py::arg("a_log"), py::arg("dt_bias"),
             py::arg("key_index"), py::arg("states"), py::arg("keys"), py::arg("updates"), py::arg("decays"),
             py::arg("row_order"), py::arg("run_slots"), py::arg("run_starts"), py::arg("run_ends"), py::arg("scale"),
             py::arg("dtype"));
}

}  // namespace leafsum
