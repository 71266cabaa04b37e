// A kernel that answers exact zeros: the control run, and the cost of a step without experts.
#pragma once

#include "ffn_faas/expert_kernel.h"

namespace ffn {

ffn_expert_kernel zero_kernel();

}  // namespace ffn
