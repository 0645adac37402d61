// Sockets, faults and the log of the stand-in for NCCL (nccl.cpp has the head).
#pragma once

#include <arpa/inet.h>
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

extern "C" int fakecuda_broken(void);

namespace fakenccl {

// ---- what happened, for tests: every name is a key of fakenccl_count

struct Counts {
  std::atomic<long> communicators{0}, roots{0}, check_ins{0}, made{0}, aborted{0}, splits{0};
  std::atomic<long> connections{0}, launches{0}, operations{0};
};
inline Counts counts;

// ---- faults to order: the table is in the head of nccl.cpp

struct Fault {
  const char* name;         // of fakenccl_order; in the environment FAKENCCL_ and this in capitals
  std::atomic<int> value{0};
  std::atomic<long> fired{0};

  explicit Fault(const char* name) : name(name) {
    std::string variable = "FAKENCCL_";
    for (const char* c = name; *c; c++) variable += (char)toupper(*c);
    if (const char* ordered = getenv(variable.c_str())) value = atoi(ordered);
  }
  // The value, and from then on 0: a fault that strikes once.
  int take() {
    int ordered = value.exchange(0);
    if (ordered) fired++;
    return ordered;
  }
};
inline Fault abort_hangs("abort_hangs"), silent("silent"), init_hangs("init_hangs"), connect_delay_ms("connect_delay_ms"),
    fail_at_issue("fail_at_issue"), fail_on_stream("fail_on_stream");
inline Fault* const faults[] = {&abort_hangs, &silent, &init_hangs, &connect_delay_ms, &fail_at_issue, &fail_on_stream};

// ---- the log: to stderr, by NCCL_DEBUG as NCCL's

enum Level { NONE, VERSION, WARN, INFO };
inline Level debug_level() {
  static const Level level = [] {
    const char* asked = getenv("NCCL_DEBUG");
    const char* names[] = {"", "VERSION", "WARN", "INFO"};
    for (int i = VERSION; asked && i <= INFO; i++)
      if (!strcasecmp(asked, names[i])) return (Level)i;
    return asked && !strcasecmp(asked, "TRACE") ? INFO : NONE;
  }();
  return level;
}
inline void log(Level level, const char* format, ...) __attribute__((format(printf, 2, 3)));
inline void log(Level level, const char* format, ...) {
  if (level > debug_level()) return;
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  fprintf(stderr, "[fakenccl %d] %s\n", (int)getpid(), line);
}
inline thread_local std::string last_error;
inline ncclResult_t failed(ncclResult_t result, const std::string& why) {
  last_error = "fakenccl: " + why;
  log(WARN, "%s (%s)", why.c_str(), ncclGetErrorString(result));
  return result;
}
#define CHECK(call)                                                   \
  do {                                                                \
    if (ncclResult_t check_ = (call); check_ != ncclSuccess) return check_; \
  } while (0)

// ---- waiting that an abort ends

struct Interrupt {
  std::atomic<bool> aborted{false};
  bool on_device = true;
  int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

  ~Interrupt() { close(event); }
  void abort() {
    aborted = true;
    uint64_t one = 1;
    if (write(event, &one, sizeof one) < 0) log(WARN, "eventfd: %s", strerror(errno));
  }
  // What is on the device ends with its context.
  bool over() const { return aborted || (on_device && fakecuda_broken()); }
};
constexpr int LOOK_MS = 50;  // how often a wait looks whether the context is dead or a fault was taken back

// Waits until one of these descriptors has an event; false if the communicator was aborted or the context died.
inline bool await(std::vector<pollfd>& descriptors, Interrupt& interrupt, int at_most_ms = -1) {
  descriptors.push_back({interrupt.event, POLLIN, 0});
  int ready = 0;
  for (int waited_ms = 0; !interrupt.over() && (at_most_ms < 0 || waited_ms < at_most_ms); waited_ms += LOOK_MS)
    if ((ready = poll(descriptors.data(), descriptors.size(), LOOK_MS)) > 0) break;
  descriptors.pop_back();
  return !interrupt.over();
}
inline bool rest(Interrupt& interrupt, int ms) {
  std::vector<pollfd> none;
  return await(none, interrupt, ms);
}
// Waits while a fault is ordered; counts it once. False if an abort ended it.
inline bool hold(Fault& fault, Interrupt& interrupt) {
  if (fault.value) fault.fired++;
  while (fault.value)
    if (!rest(interrupt, LOOK_MS)) return false;
  return !interrupt.over();
}

// ---- sockets on the loopback

inline sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons((uint16_t)port);
  return address;
}
inline int listen_anywhere(int* port) {
  int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  if (descriptor < 0 || bind(descriptor, (sockaddr*)&address, size) || listen(descriptor, SOMAXCONN) ||
      getsockname(descriptor, (sockaddr*)&address, &size)) {
    if (descriptor >= 0) close(descriptor);
    return -1;
  }
  *port = ntohs(address.sin_port);
  return descriptor;
}
inline void close_all(std::vector<int>& descriptors) {
  for (int descriptor : descriptors) close(descriptor);
  descriptors.clear();
}
inline ncclResult_t send_all(int descriptor, const void* data, size_t bytes, Interrupt& interrupt) {
  for (const char* from = (const char*)data; bytes;) {
    ssize_t sent = send(descriptor, from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      from += sent, bytes -= (size_t)sent;
      continue;
    }
    if (errno != EAGAIN && errno != EINTR) return failed(ncclRemoteError, std::string("send: ") + strerror(errno));
    std::vector<pollfd> one{{descriptor, POLLOUT, 0}};
    if (!await(one, interrupt)) return ncclInternalError;
  }
  return ncclSuccess;
}
inline ncclResult_t receive_all(int descriptor, void* data, size_t bytes, Interrupt& interrupt) {
  for (char* to = (char*)data; bytes;) {
    ssize_t received = recv(descriptor, to, bytes, MSG_DONTWAIT);
    if (received > 0) {
      to += received, bytes -= (size_t)received;
      continue;
    }
    if (received == 0) return failed(ncclRemoteError, "recv: connection closed by remote peer");
    if (errno != EAGAIN && errno != EINTR) return failed(ncclRemoteError, std::string("recv: ") + strerror(errno));
    std::vector<pollfd> one{{descriptor, POLLIN, 0}};
    if (!await(one, interrupt)) return ncclInternalError;
  }
  return ncclSuccess;
}
inline int number(const char* variable, int otherwise) {
  const char* text = getenv(variable);
  return text && *text ? atoi(text) : otherwise;
}
// Connects; a refusal is met with further tries, with NCCL's numbers: together a minute.
inline ncclResult_t dial(int port, int* descriptor, Interrupt& interrupt) {
  const int tries_max = number("NCCL_SOCKET_RETRY_CNT", 34), pause_ms = number("NCCL_SOCKET_RETRY_SLEEP_MSEC", 100);
  for (int tries = 1;; tries++) {
    int one = 1, made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (made < 0) return failed(ncclSystemError, std::string("socket: ") + strerror(errno));
    sockaddr_in address = loopback(port);
    if (!connect(made, (sockaddr*)&address, sizeof address)) {
      setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
      *descriptor = made;
      return ncclSuccess;
    }
    int error = errno;
    close(made);
    if (error != ECONNREFUSED && error != ETIMEDOUT && error != EHOSTUNREACH)
      return failed(ncclSystemError, std::string("connect: ") + strerror(error));
    if (tries == tries_max) return failed(ncclRemoteError, "connect: refused, and tried again often enough");
    if (!rest(interrupt, pause_ms * tries)) return ncclInternalError;
  }
}
inline ncclResult_t accept_one(int listener, int* descriptor, Interrupt& interrupt) {
  for (;;) {
    *descriptor = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (*descriptor >= 0) break;
    // what was reset before it was accepted is not the listener's fault; the listener itself may have been cut
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
      return failed(ncclSystemError, std::string("accept: ") + strerror(errno));
    std::vector<pollfd> one{{listener, POLLIN, 0}};
    if (!await(one, interrupt)) return ncclInternalError;
  }
  int one = 1;
  setsockopt(*descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return ncclSuccess;
}

}  // namespace fakenccl
