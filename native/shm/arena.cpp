#include "shm/arena.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

namespace ffn {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

void check_equal(const char* name, uint64_t theirs, uint64_t agreed) {
  if (theirs != agreed) {
    throw std::invalid_argument(std::string("the windows' ") + name + " is " + std::to_string(theirs) +
                                ", agreed was " + std::to_string(agreed));
  }
}

int create_memory(int64_t nbytes) {
  unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
#ifdef MFD_NOEXEC_SEAL
  int fd = memfd_create("ffn_faas", flags | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = memfd_create("ffn_faas", flags);
#else
  int fd = memfd_create("ffn_faas", flags);
#endif
  if (fd < 0) throw_errno("memfd_create");
  // Pages are taken now, where their lack is an error, and not at the first write, where it is a signal.
  if (fchmod(fd, 0600) != 0 || ftruncate(fd, nbytes) != 0 || fallocate(fd, 0, 0, nbytes) != 0 ||
      fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    throw_errno("cannot size shared memory of " + std::to_string(nbytes) + " bytes");
  }
  return fd;
}

}  // namespace

Arena::Arena(const Geometry& agreed, uint64_t session) : geometry(agreed), layout(agreed), epoch(session) {
  if (session == 0 || session > kMaxEpoch) {
    throw std::invalid_argument("epoch is " + std::to_string(session) + ", outside 1..." + std::to_string(kMaxEpoch));
  }
}

Arena::~Arena() {
  if (base_ != nullptr) munmap(base_, layout.nbytes);
  close_fd();
  if (doorbell_ >= 0) close(doorbell_);
}

void Arena::close_fd() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void Arena::map_memory() {
  void* memory = mmap(nullptr, layout.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (memory == MAP_FAILED) throw_errno("cannot map " + std::to_string(layout.nbytes) + " bytes of windows");
  base_ = static_cast<char*>(memory);
  madvise(memory, layout.nbytes, MADV_DONTDUMP);
}

void Arena::fail(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.empty()) failure_ = reason;
}

std::string Arena::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

std::shared_ptr<Arena> Arena::create(const Geometry& geometry, uint64_t epoch, int doorbell) {
  std::shared_ptr<Arena> arena;
  try {
    arena.reset(new Arena(geometry, epoch));
  } catch (...) {
    if (doorbell >= 0) close(doorbell);
    throw;
  }
  arena->doorbell_ = doorbell;
  arena->fd_ = create_memory(arena->layout.nbytes);
  arena->map_memory();
  const Header header{kMagic,
                      kLayoutVersion,
                      static_cast<uint32_t>(geometry.stages),
                      static_cast<uint64_t>(geometry.capacity),
                      static_cast<uint64_t>(geometry.hidden_size),
                      static_cast<uint64_t>(geometry.top_k),
                      static_cast<uint64_t>(geometry.element_size),
                      epoch,
                      static_cast<uint64_t>(arena->layout.nbytes)};
  std::memcpy(arena->base_, &header, sizeof(header));
  return arena;
}

std::shared_ptr<Arena> Arena::map(int fd, int doorbell, const Geometry& geometry, uint64_t epoch) {
  std::shared_ptr<Arena> arena;
  try {
    arena.reset(new Arena(geometry, epoch));
  } catch (...) {
    close(fd);
    if (doorbell >= 0) close(doorbell);
    throw;
  }
  arena->fd_ = fd;
  arena->doorbell_ = doorbell;
  struct stat status;
  if (fstat(fd, &status) != 0) throw_errno("fstat of the windows");
  check_equal("size", status.st_size, arena->layout.nbytes);
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) throw std::invalid_argument("the windows' memory can be resized");
  arena->map_memory();
  Header header;
  std::memcpy(&header, arena->base_, sizeof(header));
  check_equal("magic", header.magic, kMagic);
  check_equal("layout version", header.layout_version, kLayoutVersion);
  check_equal("stages", header.stages, geometry.stages);
  check_equal("capacity", header.capacity, geometry.capacity);
  check_equal("hidden size", header.hidden_size, geometry.hidden_size);
  check_equal("top_k", header.top_k, geometry.top_k);
  check_equal("element size", header.element_size, geometry.element_size);
  check_equal("epoch", header.epoch, epoch);
  arena->close_fd();
  return arena;
}

void Arena::poison() const {
  const int64_t routing = geometry.capacity * geometry.top_k * 4;
  for (int64_t stage = 0; stage < geometry.stages; ++stage) {
    dispatch_head(stage)[0].store(0x7f7f7f7f, std::memory_order_relaxed);
    dispatch_head(stage)[1].store(0x7f7f7f7f, std::memory_order_relaxed);
    std::memset(dispatch_ids(stage), 0x7f, routing);
    std::memset(dispatch_weights(stage), 0xff, routing);
    std::memset(dispatch_hidden(stage), 0xff, geometry.capacity * geometry.hidden_size * geometry.element_size);
    std::memset(combine_partial(stage), 0xff, geometry.capacity * geometry.hidden_size * 4);
  }
}

}  // namespace ffn
