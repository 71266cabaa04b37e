// One tile product as a function: of the instructions, or of their emulation (FFN_FAAS_EMULATED_TILES).
#if defined(FFN_FAAS_EMULATED_TILES)
#include "tiles_emulated.hpp"
#define PRODUCT emulated_product
#else
#include "experts_cpu/tiles_amx.hpp"
#define PRODUCT amx_product
#endif

// sums[rows][16] += x[rows][32] * weights[16 pairs][16 columns][2]; bf16, 1 to 16 rows.
extern "C" __attribute__((visibility("default"))) void PRODUCT(const void* x, const void* weights, float* sums,
                                                               int rows) {
  using namespace ffn::cpu;
  configure_tiles(rows, 0);
  load_tile<kFirstLeft>(sums, kTileBytes);
  load_tile<kFirstRows>(x, kTileBytes);
  load_tile<kLeft>(weights, kTileBytes);
  multiply_tiles<kFirstLeft, kFirstRows, kLeft>();
  store_tile<kFirstLeft>(sums, kTileBytes);
  release_tiles();
}
