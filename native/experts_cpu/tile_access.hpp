// Whether this process may use AMX's tile registers.
#pragma once

namespace ffn::cpu {

// The CPU multiplies bf16 tiles, and the operating system keeps tiles across context switches.
bool cpu_has_tiles();

// Asks the kernel for the right to use tiles, for all threads of this process; once, later calls repeat the answer.
// 0, or the errno of the refusal: a container's filter of system calls, a thread whose signal stack is too small for
// tiles.
int tile_permission();

}  // namespace ffn::cpu
