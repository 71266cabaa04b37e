#pragma once

#include <pybind11/pybind11.h>

void bind_arena(pybind11::module_& m);
void bind_service(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_tcp(pybind11::module_& m);
void bind_experts(pybind11::module_& m);
void bind_process(pybind11::module_& m);
