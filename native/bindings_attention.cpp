// A's half of the Python module.
#include <pybind11/stl.h>

#include <array>

#include "bindings.hpp"
#include "shm/attention_client.hpp"

namespace py = pybind11;

namespace {

ffn_attention_call call_of(int64_t stage, int64_t handle, int64_t rows, int64_t hidden_size, int64_t top_k,
                           int32_t dtype, uintptr_t x, uintptr_t ids, bool ids_are_int64, uintptr_t weights) {
  ffn_attention_call call{};
  call.stage = stage;
  call.handle = handle;
  call.rows = rows;
  call.hidden_size = hidden_size;
  call.top_k = top_k;
  call.dtype = dtype;
  call.ids_are_int64 = ids_are_int64 ? 1 : 0;
  call.x = reinterpret_cast<const void*>(x);
  call.ids = reinterpret_cast<const void*>(ids);
  call.weights = reinterpret_cast<const float*>(weights);
  return call;
}

py::dict counters_of(const ffn::AttentionClient& client) {
  py::dict result;
  result["posts"] = client.posts.load();
  result["resent"] = client.resent.load();
  result["wait_ns"] = client.wait_ns.load();
  result["sleeps"] = client.sleeps.load();
  return result;
}

std::vector<std::array<int64_t, 8>> spans_of(ffn::AttentionClient& client) {
  std::vector<std::array<int64_t, 8>> result;
  for (const ffn::PostSpan& span : client.spans.take()) {
    result.push_back({span.dispatching, span.dispatched, span.waiting, span.answered, span.summed, span.stage,
                      span.layer, span.rows});
  }
  return result;
}

}  // namespace

void bind_attention(py::module_& m) {
  m.attr("F32") = static_cast<int>(FFN_F32);
  m.attr("F16") = static_cast<int>(FFN_F16);
  m.attr("BF16") = static_cast<int>(FFN_BF16);

  py::class_<ffn_attention_call>(m, "Call").def(
      py::init(&call_of), py::kw_only(), py::arg("stage"), py::arg("handle"), py::arg("rows"), py::arg("hidden_size"),
      py::arg("top_k"), py::arg("dtype"), py::arg("x"), py::arg("ids"), py::arg("ids_are_int64"), py::arg("weights"));

  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<ffn::AttentionClient>(m, "AttentionClient")
      .def(py::init<const ffn::Geometry&, std::vector<int64_t>, int64_t>(), py::arg("geometry"),
           py::arg("expert_counts"), py::kw_only(), py::arg("spin_us") = 50)
      .def("set_layers", &ffn::AttentionClient::set_layers, py::arg("layers"))
      .def("set_link", &ffn::AttentionClient::set_link, py::arg("ffn_rank"), py::arg("arena"))
      .def("dispatch", &ffn::AttentionClient::dispatch, py::arg("call"), Unlocked())
      .def(
          "combine",
          [](ffn::AttentionClient& client, const ffn_attention_call& call, uintptr_t out) {
            client.combine(call, reinterpret_cast<void*>(out));
          },
          py::arg("call"), py::arg("out"), Unlocked())
      // hold, resume and fail keep the interpreter's lock. They never wait; and a daemon thread that had to get the
      // lock back while the interpreter ends would be unwound through noexcept frames, which aborts the process.
      .def("hold", &ffn::AttentionClient::hold)
      .def("resume", &ffn::AttentionClient::resume, py::arg("arenas"), py::arg("layers"))
      .def("longest_wait",
           [](const ffn::AttentionClient& client) {
             const auto [nanoseconds, ffn_rank] = client.longest_wait();
             return std::make_pair(static_cast<double>(nanoseconds) / 1e9, ffn_rank);
           })
      .def("fail", &ffn::AttentionClient::fail, py::arg("reason"))
      .def("bind", [](const ffn::AttentionClient& client) { return reinterpret_cast<uintptr_t>(client.table()); })
      .def("counters", &counters_of)
      .def(
          "record", [](ffn::AttentionClient& client, int64_t limit) { client.spans.start(limit); }, py::arg("limit"))
      .def("take_spans", &spans_of);
}
