// One connected stream socket, whole messages at a time.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <stdexcept>
#include <string>

namespace ffn {

// The connection is of no use any more; what() says why.
class ConnectionLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Connection {
 public:
  explicit Connection(int fd) : fd_(fd) {}  // takes the descriptor over
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Blocks until all is here. False: the peer ended the stream before the first byte. Throws ConnectionLost.
  bool receive(void* target, size_t nbytes) const;
  // receive, where the end of the stream is a loss as well.
  void require(void* target, size_t nbytes) const;
  // Blocks until all parts are handed to the kernel; changes them. Throws ConnectionLost.
  void send(iovec* parts, size_t count) const;
  // Any thread: pending and later calls fail.
  void shut_down() const;

 private:
  const int fd_;
};

}  // namespace ffn
