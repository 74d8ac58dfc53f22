#include "areas.hpp"
#include "arrays.hpp"
#include "machine.hpp"
#include "threads.hpp"

namespace leafsum {
namespace {

void check_streams(int64_t num_streams) {
  if (num_streams < 1) fail_value("num_streams", "1 or more", std::to_string(num_streams));
}

py::tuple hyper_gates(const py::array& z, int64_t num_streams, int64_t low_rank) {
  check_streams(num_streams);
  StreamGatesArgs args{};
  args.z = read<float>("z", z, {{"M"}, {"low_rank + inject"}});
  args.num_streams = num_streams;
  args.low_rank = low_rank;
  args.num_inject = z.shape(1) - low_rank;
  if (low_rank < 0 || args.num_inject < 0) {
    fail_value("low_rank", "0 to " + std::to_string(z.shape(1)), std::to_string(low_rank));
  }
  const int64_t num_rows = z.shape(0);
  py::array_t<float> inner = new_array<float>({num_rows, low_rank});
  py::array_t<float> inject = new_array<float>({num_rows, args.num_inject});
  args.inner = inner.mutable_data();
  args.inject = inject.mutable_data();
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_rows(num_rows, 2.0 * (low_rank + args.num_inject), [&](int64_t row) { set.stream_gates(args, row); });
  });
  return py::make_tuple(inner, inject);
}

int64_t stream_size(const char* argument, const py::array& streams, int64_t num_streams) {
  check_streams(num_streams);
  read<float>(argument, streams, {{"M"}, {"S*H"}});
  if (streams.shape(1) % num_streams != 0) {
    fail_value(argument, "a row size divisible by " + std::to_string(num_streams), std::to_string(streams.shape(1)));
  }
  return streams.shape(1) / num_streams;
}

py::array hyper_mix(const py::array& y, const py::array& normed, int64_t num_streams) {
  StreamMixArgs args{};
  args.size = stream_size("y", y, num_streams);
  args.num_streams = num_streams;
  const int64_t num_rows = y.shape(0);
  args.y = static_cast<const float*>(y.data());
  args.normed = read<float>("normed", normed, {{"M", num_rows}, {"S*H", num_streams * args.size}});
  py::array_t<float> out = new_array<float>({num_rows, args.size});
  args.out = out.mutable_data();
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_rows(num_rows, 2.0 * num_streams * args.size, [&](int64_t row) { set.stream_mix(args, row); });
  });
  return out;
}

py::array hyper_write(const py::array& streams, const py::array& y, const py::array& weights) {
  StreamWriteArgs args{};
  args.weights = read<float>("weights", weights, {{"M"}, {"S"}});
  args.num_streams = weights.shape(1);
  const int64_t num_rows = weights.shape(0);
  args.y = read<float>("y", y, {{"M", num_rows}, {"H"}});
  args.size = y.shape(1);
  args.streams = read<float>("streams", streams, {{"M", num_rows}, {"S*H", args.num_streams * args.size}});
  py::array_t<float> out = new_array<float>(shape_of(streams));
  args.out = out.mutable_data();
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_rows(num_rows, 0.3 * args.num_streams * args.size, [&](int64_t row) { set.stream_write(args, row); });
  });
  return out;
}

py::array ngram_values(const py::array& key_normed, const py::array& query_normed, const py::array& value,
                       double scale) {
  NgramValuesArgs args{};
  args.value = read<float>("value", value, {{"M"}, {"H"}});
  const int64_t num_rows = value.shape(0);
  args.size = value.shape(1);
  if (args.size < 1) fail_value("value", "at least one element a row", "H = 0");
  args.keys = read<float>("key_normed", key_normed, {{"M", num_rows}, {"S*H"}});
  if (key_normed.shape(1) % args.size != 0) {
    fail_value("key_normed", "a row size divisible by H = " + std::to_string(args.size),
               std::to_string(key_normed.shape(1)));
  }
  args.num_streams = key_normed.shape(1) / args.size;
  args.queries = read<float>("query_normed", query_normed, {{"M", num_rows}, {"S*H", key_normed.shape(1)}});
  args.scale = static_cast<float>(scale);
  py::array_t<float> out = new_array<float>(shape_of(key_normed));
  args.out = out.mutable_data();
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_rows(num_rows, 1.0 * args.num_streams * args.size, [&](int64_t row) { set.ngram_values(args, row); });
  });
  return out;
}

}  // namespace

void register_streams(py::module_& module) {
  module.def("hyper_gates", &hyper_gates, py::arg("z"), py::arg("num_streams"), py::arg("low_rank"));
  module.def("hyper_mix", &hyper_mix, py::arg("y"), py::arg("normed"), py::arg("num_streams"));
  module.def("hyper_write", &hyper_write, py::arg("streams"), py::arg("y"), py::arg("weights"));
  module.def("ngram_values", &ngram_values, py::arg("key_normed"), py::arg("query_normed"), py::arg("value"),
             py::arg("scale"));
}

}  // namespace leafsum
