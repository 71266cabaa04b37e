// F's half of the Python module: receiver, items, kernels written in C++.
#include <pybind11/stl.h>

#include <array>
#include <map>
#include <string>

#include "bindings.hpp"
#include "shm/item_receiver.hpp"
#include "shm/zero_kernel.hpp"

namespace py = pybind11;

namespace {

// Memory of an item as a buffer that keeps the item, and with it the link's windows, alive.
struct ItemBuffer {
  std::shared_ptr<ffn::Item> item;
  void* data;
  py::ssize_t element_size;
  const char* format;
  py::ssize_t columns;
};

py::memoryview view_of(const std::shared_ptr<ffn::Item>& item, const void* data, py::ssize_t element_size,
                       const char* format, py::ssize_t columns) {
  return py::memoryview(py::cast(ItemBuffer{item, const_cast<void*>(data), element_size, format, columns}));
}

class ZeroKernel {
 public:
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(&kernel_); }

 private:
  const ffn_expert_kernel kernel_ = ffn::zero_kernel();
};

void bind_item(py::module_& m) {
  using ItemPtr = std::shared_ptr<ffn::Item>;
  py::class_<ItemBuffer>(m, "_ItemBuffer", py::buffer_protocol()).def_buffer([](ItemBuffer& buffer) {
    const py::ssize_t rows = buffer.item->rows;
    return py::buffer_info(buffer.data, buffer.element_size, buffer.format, 2, {rows, buffer.columns},
                           {buffer.columns * buffer.element_size, buffer.element_size});
  });
  py::class_<ffn::Item, ItemPtr>(m, "Item")
      .def_property_readonly("parts",
                             [](const ffn::Item& item) {
                               std::vector<std::tuple<int64_t, int64_t, int64_t>> parts;
                               for (const ffn::Part& part : item.parts) {
                                 parts.emplace_back(part.link->key, part.stage, part.rows);
                               }
                               return parts;
                             })
      .def_property_readonly("layer", [](const ffn::Item& item) { return item.layer; })
      .def_property_readonly("rows", [](const ffn::Item& item) { return item.rows; })
      .def_property_readonly("hidden",
                             [](const ItemPtr& item) {
                               const ffn_item view = item->view();
                               return view_of(item, view.hidden, 1, "B", view.hidden_size * view.element_size);
                             })
      .def_property_readonly("expert_ids",
                             [](const ItemPtr& item) {
                               const ffn_item view = item->view();
                               return view_of(item, view.expert_ids, 4, "i", view.top_k);
                             })
      .def_property_readonly("weights",
                             [](const ItemPtr& item) {
                               const ffn_item view = item->view();
                               return view_of(item, view.weights, 4, "f", view.top_k);
                             })
      .def_property_readonly("partial",
                             [](const ItemPtr& item) {
                               const ffn_item view = item->view();
                               return view_of(item, view.partial, 4, "f", view.hidden_size);
                             })
      .def("complete", &ffn::Item::complete);
}

py::dict counters_of(const ffn::ItemReceiver& receiver) {
  const ffn::Counters& counters = receiver.counters();
  py::dict result;
  result["steps"] = counters.steps.load();
  result["posts"] = counters.posts.load();
  result["splits"] = counters.splits.load();
  result["rows"] = counters.rows.load();
  result["last_step_monotonic_ns"] = counters.last_step_monotonic_ns.load();
  result["taken_at_ns"] = counters.taken_at_ns.load();
  return result;
}

using Buckets = std::pair<std::vector<std::pair<int64_t, int64_t>>, int64_t>;

// ((upper bound, count) ..., sum of the values); the last bound, -1, is open.
template <size_t N>
Buckets buckets_of(const ffn::Histogram<N>& histogram) {
  Buckets result{{}, histogram.total()};
  for (size_t index = 0; index <= N; ++index) {
    result.first.emplace_back(index < N ? histogram.bounds()[index] : int64_t{-1}, histogram.count(index));
  }
  return result;
}

std::vector<std::vector<int64_t>> expert_rows_of(const ffn::ItemReceiver& receiver) {
  std::vector<std::vector<int64_t>> result;
  const ffn::ExpertRows* table = receiver.counters().experts.load(std::memory_order_acquire);
  for (int64_t layer = 0; table != nullptr && layer < table->layers; ++layer) {
    const auto first = table->rows.begin() + layer * table->experts;
    result.emplace_back(first, first + table->experts);
  }
  return result;
}

std::vector<std::array<int64_t, 9>> spans_of(ffn::ItemReceiver& receiver) {
  std::vector<std::array<int64_t, 9>> result;
  for (const ffn::StepSpan& span : receiver.spans().take()) {
    result.push_back({span.began, span.taken, span.gathered, span.sorted, span.computed, span.sent, span.layer,
                      span.rows, span.parts});
  }
  return result;
}

}  // namespace

void bind_service(py::module_& m) {
  bind_item(m);
  py::class_<ZeroKernel>(m, "ZeroKernel").def(py::init<>()).def_property_readonly("address", &ZeroKernel::address);

  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<ffn::ItemReceiver>(m, "ItemReceiver")
      .def(py::init<int64_t, int64_t, int64_t>(), py::kw_only(), py::arg("spin_us") = 50, py::arg("item_limit") = 4096,
           py::arg("merge_wait_us") = 5)
      .def_property_readonly("doorbell", &ffn::ItemReceiver::doorbell)
      .def("add_link", &ffn::ItemReceiver::add_link, py::arg("key"), py::arg("arena"), py::arg("expert_counts"),
           Unlocked())
      .def("remove_link", &ffn::ItemReceiver::remove_link, py::arg("key"), Unlocked())
      .def("receive", &ffn::ItemReceiver::receive, py::arg("timeout_us"), Unlocked())
      .def(
          "step",
          [](ffn::ItemReceiver& receiver, uintptr_t kernel, int64_t timeout_us) {
            return receiver.step(*reinterpret_cast<const ffn_expert_kernel*>(kernel), timeout_us);
          },
          py::arg("kernel"), py::arg("timeout_us"), Unlocked())
      .def("cancel", &ffn::ItemReceiver::cancel)
      .def("take_faults", &ffn::ItemReceiver::take_faults)
      .def("counters", &counters_of)
      .def("posts_per_item", [](const ffn::ItemReceiver& receiver) { return buckets_of(receiver.counters().parts); })
      .def("step_times",
           [](const ffn::ItemReceiver& receiver) {
             const ffn::Counters& counters = receiver.counters();
             return std::map<std::string, Buckets>{{"wait", buckets_of(counters.wait)},
                                                   {"compute", buckets_of(counters.compute)},
                                                   {"send", buckets_of(counters.send)}};
           })
      .def("expert_rows", &expert_rows_of)
      .def(
          "record", [](ffn::ItemReceiver& receiver, int64_t limit) { receiver.spans().start(limit); }, py::arg("limit"))
      .def("recorded", [](ffn::ItemReceiver& receiver) { return receiver.spans().count(); })
      .def("take_spans", &spans_of);
}
