#include "cam_twin/settings.hpp"

namespace cam_twin {

namespace {
Settings current;  // written before the first operator of a process runs, or between tests
}

void configure(const Settings& settings) { current = settings; }
const Settings& settings() { return current; }

}  // namespace cam_twin
