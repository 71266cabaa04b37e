// The Python module ffn_faas._native; ffn_faas/_native.pyi is its documentation.
#include "bindings.hpp"

#include <pybind11/stl.h>

#include <system_error>

#include "shm/arena.hpp"

namespace py = pybind11;

namespace {

py::memoryview whole(const ffn::Arena& arena) {
  return py::memoryview::from_memory(arena.base(), static_cast<py::ssize_t>(arena.nbytes()));
}

py::dict offsets(const ffn::Geometry& geometry) {
  const ffn::Layout layout(geometry);
  py::dict result;
  result["receiver_sleeping"] = layout.receiver_sleeping;
  result["first_stage"] = layout.first_stage;
  result["stage_stride"] = layout.stage_stride;
  result["dispatch_flag"] = layout.dispatch_flag;
  result["dispatch_layer"] = layout.dispatch_layer;
  result["dispatch_rows"] = layout.dispatch_layer + 4;
  result["dispatch_ids"] = layout.dispatch_ids;
  result["dispatch_weights"] = layout.dispatch_weights;
  result["dispatch_hidden"] = layout.dispatch_hidden;
  result["combine_flag"] = layout.combine_flag;
  result["combine_sleeping"] = layout.combine_sleeping;
  result["combine_partial"] = layout.combine_partial;
  result["nbytes"] = layout.nbytes;
  return result;
}

void raise_as_os_error(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const std::system_error& error) {
    const py::tuple arguments = py::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

}  // namespace

void bind_arena(py::module_& m) {
  py::class_<ffn::Geometry>(m, "Geometry")
      .def(py::init([](int64_t stages, int64_t capacity, int64_t hidden_size, int64_t top_k, int64_t element_size) {
             const ffn::Geometry geometry{stages, capacity, hidden_size, top_k, element_size};
             geometry.check();
             return geometry;
           }),
           py::kw_only(), py::arg("stages"), py::arg("capacity"), py::arg("hidden_size"), py::arg("top_k"),
           py::arg("element_size"))
      .def("offsets", &offsets)
      .def("__eq__", [](const ffn::Geometry& a, const ffn::Geometry& b) { return a == b; }, py::is_operator());

  py::class_<ffn::Arena, std::shared_ptr<ffn::Arena>>(m, "Arena")
      .def_static(
          "create", [](const ffn::Geometry& geometry, uint64_t epoch) { return ffn::Arena::create(geometry, epoch); },
          py::arg("geometry"), py::arg("epoch"))
      .def_static("map", &ffn::Arena::map, py::arg("fd"), py::arg("doorbell"), py::arg("geometry"), py::arg("epoch"))
      .def_property_readonly("fd", &ffn::Arena::fd)
      .def_property_readonly("nbytes", &ffn::Arena::nbytes)
      .def_property_readonly("epoch", [](const ffn::Arena& arena) { return arena.epoch; })
      .def_property_readonly("failure", &ffn::Arena::failure)
      .def("close_fd", &ffn::Arena::close_fd)
      .def("view", &whole, py::keep_alive<0, 1>())
      .def("poison", &ffn::Arena::poison);
}

PYBIND11_MODULE(_native, m) {
  m.doc() = "Data plane of ffn_faas; links no torch.";
  m.attr("LAYOUT_VERSION") = ffn::kLayoutVersion;
  py::register_exception_translator(&raise_as_os_error);
  bind_arena(m);
  bind_service(m);
  bind_attention(m);
  bind_tcp(m);
  bind_experts(m);
  bind_process(m);
}
