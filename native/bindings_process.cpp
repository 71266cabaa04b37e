// Last words of an F rank, for Python.
#include <pybind11/stl.h>

#include "bindings.hpp"
#include "process/last_words.hpp"

namespace py = pybind11;

void bind_process(py::module_& m) {
  m.def("arm_watchdog", &ffn::arm_watchdog, py::arg("seconds"), py::arg("exit_code"), py::arg("message"),
        py::arg("files"));
  m.def("disarm_watchdog", &ffn::disarm_watchdog);
  m.def("bound_signals", &ffn::bound_signals, py::arg("from_fd"), py::arg("to_fd"), py::arg("seconds"),
        py::arg("exit_code"), py::arg("message"), py::arg("files"));
  m.def("record_crashes", &ffn::record_crashes, py::arg("record_path"), py::arg("record"));
}
