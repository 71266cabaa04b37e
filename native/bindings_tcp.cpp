// Windows over TCP: both halves.
#include <pybind11/stl.h>

#include "bindings.hpp"
#include "shm/item_receiver.hpp"
#include "tcp/mirror.hpp"

namespace py = pybind11;

namespace {

// The arena keeps its mirror alive: the connection ends with its last user.
std::shared_ptr<ffn::Arena> connect_windows(int fd, const ffn::Geometry& geometry, uint64_t epoch) {
  auto mirror = std::make_shared<ffn::AttentionMirror>(geometry, epoch, fd);
  ffn::Arena* arena = mirror->arena().get();
  return std::shared_ptr<ffn::Arena>(std::move(mirror), arena);
}

std::unique_ptr<ffn::ServiceMirror> serve_windows(int fd, std::shared_ptr<ffn::Arena> arena,
                                                  ffn::ItemReceiver& receiver, int64_t key) {
  const auto on_fault = [&receiver, key](const std::string& reason) { receiver.fail_link(key, reason); };
  return std::make_unique<ffn::ServiceMirror>(std::move(arena), fd, receiver.doorbell(), on_fault);
}

}  // namespace

void bind_tcp(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<ffn::ServiceMirror>(m, "ServiceMirror")
      .def(py::init(&serve_windows), py::arg("fd"), py::arg("arena"), py::arg("receiver"), py::arg("key"),
           py::keep_alive<1, 4>())
      .def("close", &ffn::ServiceMirror::close, Unlocked());
  m.def("connect_windows", &connect_windows, py::arg("fd"), py::arg("geometry"), py::arg("epoch"));
}
