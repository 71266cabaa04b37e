#include "shm/layout.hpp"

#include <stdexcept>
#include <string>

namespace ffn {
namespace {

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", outside " +
                                std::to_string(low) + "..." + std::to_string(high));
  }
}

int64_t align(int64_t offset) { return (offset + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

void Geometry::check() const {
  check_range("stages", stages, 1, 8);
  check_range("capacity", capacity, 1, int64_t{1} << 20);
  check_range("hidden_size", hidden_size, 1, int64_t{1} << 20);
  check_range("top_k", top_k, 1, 1024);
  if (element_size != 1 && element_size != 2 && element_size != 4) {
    throw std::invalid_argument("element_size is " + std::to_string(element_size) + ", not 1, 2 or 4");
  }
}

bool Geometry::operator==(const Geometry& other) const {
  return stages == other.stages && capacity == other.capacity && hidden_size == other.hidden_size &&
         top_k == other.top_k && element_size == other.element_size;
}

Layout::Layout(const Geometry& geometry) {
  geometry.check();
  receiver_sleeping = kAlignment;
  first_stage = 2 * kAlignment;
  const int64_t routing = align(geometry.capacity * geometry.top_k * 4);
  dispatch_flag = 0;
  dispatch_layer = kAlignment;
  dispatch_ids = 2 * kAlignment;
  dispatch_weights = dispatch_ids + routing;
  dispatch_hidden = dispatch_weights + routing;
  combine_flag = dispatch_hidden + align(geometry.capacity * geometry.hidden_size * geometry.element_size);
  combine_sleeping = combine_flag + kAlignment;
  combine_partial = combine_sleeping + kAlignment;
  stage_stride = combine_partial + align(geometry.capacity * geometry.hidden_size * 4);
  nbytes = first_stage + geometry.stages * stage_stride;
}

}  // namespace ffn
