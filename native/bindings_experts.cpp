// F's expert kernel for CPUs, for Python: made, filled and, in tests and benches, called from there.
#include <pybind11/stl.h>

#include <chrono>

#include "bindings.hpp"
#include "experts_cpu/dispatch.hpp"
#include "experts_cpu/experts.hpp"

namespace py = pybind11;

namespace {

using ffn::cpu::Experts;
using ffn::cpu::Layout;
using ffn::cpu::Matrix;
using ffn::cpu::Type;

Type type_of(int32_t dtype) {
  if (dtype < 0 || dtype > 2) throw std::invalid_argument("dtype " + std::to_string(dtype) + " is unknown");
  return static_cast<Type>(dtype);
}

Matrix matrix_of(int32_t matrix) {
  if (matrix < 0 || matrix > 2) throw std::invalid_argument("matrix " + std::to_string(matrix) + " is unknown");
  return static_cast<Matrix>(matrix);
}

// Experts and the table by which the data plane calls them.
class ExpertsCpu {
 public:
  ExpertsCpu(int64_t layers, int64_t experts, int64_t hidden, int64_t inter, int32_t dtype, int threads,
             const std::string& path)
      : experts_(checked(layers), checked(experts), Layout(checked(hidden), checked(inter), type_of(dtype)),
                 static_cast<int>(checked(threads)), path) {}

  Experts& experts() { return experts_; }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(&kernel_); }

 private:
  static int64_t checked(int64_t size) {
    if (size < 1 || size > (int64_t{1} << 31)) throw std::invalid_argument(std::to_string(size) + " is out of range");
    return size;
  }

  Experts experts_;
  const ffn_expert_kernel kernel_{
      &experts_, [](void* self, const ffn_item* item) { return static_cast<Experts*>(self)->compute(*item); }};
};

int compute(ExpertsCpu& self, int32_t layer, int64_t rows, int32_t top_k, uintptr_t hidden, uintptr_t ids,
            uintptr_t weights, uintptr_t partial) {
  const Layout& layout = self.experts().layout();
  ffn_item item{};
  item.rows = rows;
  item.layer = layer;
  item.top_k = top_k;
  item.hidden_size = static_cast<int32_t>(layout.hidden);
  item.element_size = static_cast<int32_t>(size_of(layout.type));
  item.hidden = reinterpret_cast<const void*>(hidden);
  item.expert_ids = reinterpret_cast<const int32_t*>(ids);
  item.weights = reinterpret_cast<const float*>(weights);
  item.partial = reinterpret_cast<float*>(partial);
  return self.experts().compute(item);
}

// Runs `part(worker)` once on each of `threads` threads, all at once; returns the seconds that took.
template <class Part>
double timed_on_threads(int threads, const Part& part) {
  std::atomic<int> ready{0};
  std::vector<std::thread> others;
  const auto meet = [&] {
    ready.fetch_add(1);
    while (ready.load() < threads) {
    }
  };
  for (int worker = 1; worker < threads; ++worker) {
    others.emplace_back([&, worker] {
      meet();
      part(worker);
    });
  }
  meet();
  const auto start = std::chrono::steady_clock::now();
  part(0);
  for (std::thread& other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double peak_flops(int threads, int32_t dtype, const std::string& path, int64_t rounds) {
  const ffn::cpu::Path& chosen = ffn::cpu::choose_path(type_of(dtype), path);
  std::atomic<int64_t> flops{0};
  const double seconds = timed_on_threads(threads, [&](int) { flops.fetch_add(chosen.peak(rounds)); });
  return static_cast<double>(flops.load()) / seconds;
}

double read_bandwidth(int threads, uintptr_t address, int64_t nbytes) {
  const ffn::cpu::Path& chosen = ffn::cpu::choose_path(Type::bf16, "auto");
  const int64_t share = nbytes / threads / 64 * 64;
  std::atomic<uint64_t> kept{0};
  const double seconds = timed_on_threads(threads, [&](int worker) {
    kept.fetch_or(chosen.read(reinterpret_cast<const char*>(address) + worker * share, share));
  });
  return static_cast<double>(share * threads) / seconds;
}

}  // namespace

void bind_experts(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<ExpertsCpu>(m, "ExpertsCpu")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int32_t, int, const std::string&>(), py::kw_only(),
           py::arg("layers"), py::arg("experts"), py::arg("hidden_size"), py::arg("intermediate_size"),
           py::arg("dtype"), py::arg("threads"), py::arg("path") = "auto")
      .def_static(
          "paths", [](int32_t dtype) { return ffn::cpu::available_paths(type_of(dtype)); }, py::arg("dtype"))
      .def_static(
          "refused", [](int32_t dtype) { return ffn::cpu::refused_path(type_of(dtype)); }, py::arg("dtype"))
      .def_property_readonly("address", &ExpertsCpu::address)
      .def_property_readonly("path", [](ExpertsCpu& self) { return std::string(self.experts().path().name); })
      .def_property_readonly("threads", [](ExpertsCpu& self) { return self.experts().pool().size(); })
      .def_property_readonly("nbytes", [](ExpertsCpu& self) { return self.experts().weight_bytes(); })
      .def(
          "pack",
          [](ExpertsCpu& self, int64_t layer, int64_t expert, int32_t matrix, uintptr_t source) {
            self.experts().pack(layer, expert, matrix_of(matrix), reinterpret_cast<const void*>(source));
          },
          py::arg("layer"), py::arg("expert"), py::arg("matrix"), py::arg("source"), Unlocked())
      .def(
          "unpack",
          [](ExpertsCpu& self, int64_t layer, int64_t expert, int32_t matrix, uintptr_t target) {
            self.experts().unpack(layer, expert, matrix_of(matrix), reinterpret_cast<void*>(target));
          },
          py::arg("layer"), py::arg("expert"), py::arg("matrix"), py::arg("target"), Unlocked())
      .def("compute", &compute, py::arg("layer"), py::arg("rows"), py::arg("top_k"), py::arg("hidden"), py::arg("ids"),
           py::arg("weights"), py::arg("partial"), Unlocked());
  m.def("cpu_peak_flops", &peak_flops, py::kw_only(), py::arg("threads"), py::arg("dtype"), py::arg("path") = "auto",
        py::arg("rounds") = 20'000'000, Unlocked());
  m.def("cpu_read_bandwidth", &read_bandwidth, py::kw_only(), py::arg("threads"), py::arg("address"), py::arg("nbytes"),
        Unlocked());
}
