#include "tcp/connection.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ffn {
namespace {

[[noreturn]] void lose(const char* what) {
  throw ConnectionLost(std::string("the data connection is lost: ") + what + std::strerror(errno));
}

}  // namespace

Connection::~Connection() { close(fd_); }

bool Connection::receive(void* target, size_t nbytes) const {
  auto* next = static_cast<char*>(target);
  for (size_t left = nbytes; left > 0;) {
    const ssize_t count = recv(fd_, next, left, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) lose("");
    if (count == 0 && left == nbytes) return false;
    if (count == 0) throw ConnectionLost("the data connection is lost: it ended inside a message");
    next += count;
    left -= static_cast<size_t>(count);
  }
  return true;
}

void Connection::require(void* target, size_t nbytes) const {
  if (nbytes > 0 && !receive(target, nbytes)) {
    throw ConnectionLost("the data connection is lost: it ended inside a message");
  }
}

void Connection::send(iovec* parts, size_t count) const {
  for (;;) {
    while (count > 0 && parts->iov_len == 0) ++parts, --count;
    if (count == 0) return;
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) lose("");
    while (count > 0 && static_cast<size_t>(sent) >= parts->iov_len) {
      sent -= static_cast<ssize_t>(parts->iov_len);
      ++parts, --count;
    }
    if (count > 0) {
      parts->iov_base = static_cast<char*>(parts->iov_base) + sent;
      parts->iov_len -= static_cast<size_t>(sent);
    }
  }
}

void Connection::shut_down() const { shutdown(fd_, SHUT_RDWR); }

}  // namespace ffn
