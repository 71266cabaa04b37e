#include "cam_twin/ops.hpp"
namespace cam_twin {
template <bool kExecute>
void add_layered(torch::stable::detail::StableLibrary&) {}
template void add_layered<true>(torch::stable::detail::StableLibrary&);
template void add_layered<false>(torch::stable::detail::StableLibrary&);
}  // namespace cam_twin
