#include "cam_twin/settings.hpp"

#include <atomic>
#include <cstdlib>
#include <deque>
#include <mutex>

namespace cam_twin {

namespace {

constexpr char kBeforeNumber = '\x1f';  // no communicator has it in its name

std::mutex mutex;
std::deque<Settings> all{Settings{}};  // addresses stay
std::atomic<const Settings*> newest{&all.front()};
thread_local const Settings* in_use = nullptr;

}  // namespace

int64_t add(const Settings& settings) {
  const std::lock_guard<std::mutex> lock(mutex);
  all.push_back(settings);
  newest.store(&all.back(), std::memory_order_release);
  return static_cast<int64_t>(all.size()) - 1;
}

Use::Use(std::string* group_name) {
  const size_t place = group_name->rfind(kBeforeNumber);
  if (place == std::string::npos) return;
  const size_t number = std::strtoull(group_name->c_str() + place + 1, nullptr, 10);
  group_name->resize(place);
  const std::lock_guard<std::mutex> lock(mutex);
  if (number < all.size()) in_use = &all[number];
}

Use::~Use() { in_use = nullptr; }

const Settings& settings() { return in_use != nullptr ? *in_use : *newest.load(std::memory_order_acquire); }

}  // namespace cam_twin
