// The Python module ffn_faas._native: windows and what moves over them.
#include <pybind11/pybind11.h>

#include "shm/layout.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
  m.doc() = "Data plane of ffn_faas; links no torch.";
  m.attr("LAYOUT_VERSION") = ffn::kLayoutVersion;
}
