// Which paths this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "experts_cpu/path.hpp"

namespace ffn::cpu {

// Names of the paths that this CPU and operating system run for weights of `type`, best first; never empty.
std::vector<std::string> available_paths(Type type);

// Why a path that this CPU has is not among them: "amx: Operation not permitted". Empty otherwise.
std::string refused_path(Type type);

// The path of that name, "auto" for the best. Throws std::invalid_argument for one that is not available.
const Path& choose_path(Type type, const std::string& name);

}  // namespace ffn::cpu
