// Communicators of the stand-in for NCCL: bootstrap, split, connections (nccl.cpp has the head).
#pragma once

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "nccl_arithmetic.hpp"
#include "nccl_wire.hpp"

namespace fakenccl {

enum Lane : int { RING, PAIR };               // collectives; sends and receives
enum class Knock : int { CHECK_IN, SUCCESSOR, RING, LINK };

struct Hello {
  uint64_t magic;
  Knock knock;
  int rank, ranks, port;                      // port: the caller's listener, or its successor's
  Lane lane;
};
struct Peer {
  uint64_t host;
  char bus[32];
  int port;
};
struct Parked {                               // accepted before this rank asked for it
  Hello hello;
  int descriptor;
};
constexpr char ACCEPTED = 'A', GOODBYE = 'B';  // what a receiver writes to its sender

}  // namespace fakenccl

struct ncclComm {
  int rank = 0, ranks = 0, device = 0, port = 0, children = 0;
  uint64_t magic = 0;
  bool ready = false, finalized = false;
  int listener = -1, successor = -1, predecessor = -1;  // the ring of the bootstrap is kept, for splits
  std::vector<fakenccl::Peer> peers;
  std::vector<fakenccl::Parked> parked;
  std::map<std::pair<int, fakenccl::Lane>, int> out, in;
  std::map<int, fakenccl::Reduction> operators;  // of ncclRedOpCreatePreMulSum
  int operators_made = 0;
  void* device_memory = nullptr;
  void* host_memory = nullptr;

  fakenccl::Interrupt interrupt;
  std::atomic<int> error{ncclSuccess};        // the asynchronous one; the first stays
  std::mutex launching;
  std::mutex lock;
  std::condition_variable moved;
  long launched = 0, finished = 0;            // kernels
  int inside = 0;                             // threads in the middle of a call

  void fail(ncclResult_t result) {
    int none = ncclSuccess;
    error.compare_exchange_strong(none, result);
  }
};

namespace fakenccl {

// ---- which communicators there are: a freed one is refused, where NCCL would read freed memory

struct Registry {
  std::mutex lock;
  std::set<ncclComm*> all;
};
inline Registry& registry() {
  static auto* const made = new Registry;     // never destroyed: threads outlive main
  return *made;
}
// Keeps a communicator from being freed while a call uses it.
class Use {
 public:
  explicit Use(ncclComm* wanted) {
    std::lock_guard<std::mutex> all(registry().lock);
    if (!registry().all.count(wanted)) return;
    std::lock_guard<std::mutex> one(wanted->lock);
    wanted->inside++;
    comm = wanted;
  }
  ~Use() {
    if (!comm) return;
    std::lock_guard<std::mutex> one(comm->lock);
    comm->inside--;
    comm->moved.notify_all();
  }
  Use(const Use&) = delete;
  ncclComm* comm = nullptr;
};
inline ncclResult_t unknown() { return failed(ncclInvalidArgument, "no such communicator, or it was freed"); }

// ---- the root of a bootstrap: who comes next to whom, once all have checked in

struct Root {
  Interrupt interrupt;
  int listener = -1;
  std::thread thread;
};
inline std::map<uint64_t, Root*>& roots() {
  static auto* const made = new std::map<uint64_t, Root*>;
  return *made;
}
inline std::mutex roots_lock;

inline ncclResult_t serve_root(Root* root, uint64_t magic) {
  std::map<int, int> ports;
  for (int ranks = 1; (int)ports.size() < ranks;) {
    int descriptor = -1;
    CHECK(accept_one(root->listener, &descriptor, root->interrupt));
    Hello hello{};
    bool whole = !receive_all(descriptor, &hello, sizeof hello, root->interrupt);
    close(descriptor);
    if (!whole || hello.magic != magic || hello.knock != Knock::CHECK_IN) continue;
    if (ports.count(hello.rank)) return failed(ncclInternalError, "a rank has checked in twice");
    ports[hello.rank] = hello.port;
    ranks = hello.ranks;
    counts.check_ins++;
  }
  for (auto& [rank, port] : ports) {
    int descriptor = -1, ranks = (int)ports.size();
    CHECK(dial(port, &descriptor, root->interrupt));
    Hello hello{magic, Knock::SUCCESSOR, rank, ranks, ports[(rank + 1) % ranks], RING};
    ncclResult_t told = send_all(descriptor, &hello, sizeof hello, root->interrupt);
    close(descriptor);
    CHECK(told);
  }
  return ncclSuccess;
}
inline ncclResult_t open_root(uint64_t magic, int* port) {
  auto* root = new Root;
  root->interrupt.on_device = false;
  root->listener = listen_anywhere(port);
  if (root->listener < 0) {
    delete root;
    return failed(ncclSystemError, "no socket for the root of a bootstrap");
  }
  counts.roots++;
  std::lock_guard<std::mutex> guard(roots_lock);
  roots()[magic] = root;
  root->thread = std::thread([root, magic] {
    pthread_setname_np(pthread_self(), "fakenccl-root");
    serve_root(root, magic);
    shutdown(root->listener, SHUT_RDWR);      // who comes late is refused
  });
  return ncclSuccess;
}
// Ends the root of this bootstrap, if it is in this process: all have been served, or the init has failed.
inline void close_root(uint64_t magic) {
  Root* root = nullptr;
  {
    std::lock_guard<std::mutex> guard(roots_lock);
    auto found = roots().find(magic);
    if (found == roots().end()) return;
    root = found->second;
    roots().erase(found);
  }
  root->interrupt.abort();
  root->thread.join();
  close(root->listener);
  delete root;
  counts.roots--;
}

// ---- making one

// Returns the descriptor of the next caller of this kind and lane; others are parked.
inline ncclResult_t await_knock(ncclComm* comm, Knock knock, int rank, Lane lane, Parked* found) {
  for (;;) {
    for (auto at = comm->parked.begin(); at != comm->parked.end(); ++at)
      if (at->hello.knock == knock && at->hello.rank == rank && at->hello.lane == lane) {
        *found = *at;
        comm->parked.erase(at);
        return ncclSuccess;
      }
    Parked next{};
    CHECK(accept_one(comm->listener, &next.descriptor, comm->interrupt));
    ncclResult_t result = receive_all(next.descriptor, &next.hello, sizeof next.hello, comm->interrupt);
    if (!result && next.hello.magic == comm->magic) comm->parked.push_back(next);
    else close(next.descriptor);              // a stranger, or one that died: NCCL, too, goes on accepting
    if (result == ncclInternalError) return result;
  }
}
// Everybody's entry to everybody, around the ring; entries[rank] is this rank's. Blocks: until all are here.
template <class Entry> ncclResult_t all_gather(ncclComm* comm, std::vector<Entry>& entries) {
  for (int step = 0; step + 1 < comm->ranks; step++) {
    int mine = (comm->rank - step + comm->ranks) % comm->ranks, theirs = (mine - 1 + comm->ranks) % comm->ranks;
    CHECK(send_all(comm->successor, &entries[mine], sizeof(Entry), comm->interrupt));
    CHECK(receive_all(comm->predecessor, &entries[theirs], sizeof(Entry), comm->interrupt));
  }
  return ncclSuccess;
}
inline uint64_t hash(const std::string& text) {
  uint64_t value = 1469598103934665603ull;    // FNV-1a
  for (unsigned char c : text) value = (value ^ c) * 1099511628211ull;
  return value;
}
inline uint64_t host_hash() {
  if (const char* told = getenv("NCCL_HOSTID")) return hash(told);
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return hash(name);
}
inline ncclResult_t listen_for(ncclComm* comm) {
  comm->listener = listen_anywhere(&comm->port);
  return comm->listener < 0 ? failed(ncclSystemError, "no socket to listen on") : ncclSuccess;
}
inline ncclResult_t join_ring(ncclComm* comm, int port) {
  CHECK(dial(port, &comm->successor, comm->interrupt));
  Hello hello{comm->magic, Knock::RING, comm->rank, comm->ranks, 0, RING};
  CHECK(send_all(comm->successor, &hello, sizeof hello, comm->interrupt));
  Parked from{};
  CHECK(await_knock(comm, Knock::RING, (comm->rank - 1 + comm->ranks) % comm->ranks, RING, &from));
  comm->predecessor = from.descriptor;

  comm->peers.assign(comm->ranks, Peer{});
  Peer& own = comm->peers[comm->rank];
  own.host = host_hash();
  own.port = comm->port;
  if (cudaDeviceGetPCIBusId(own.bus, sizeof own.bus, comm->device)) return ncclUnhandledCudaError;
  CHECK(all_gather(comm, comm->peers));
  for (int r = 0; r < comm->ranks && !number("NCCL_MULTI_RANK_GPU_ENABLE", 0); r++)
    if (r != comm->rank && comm->peers[r].host == own.host && !strcmp(comm->peers[r].bus, own.bus))
      return failed(ncclInvalidUsage, "ranks " + std::to_string(r) + " and " + std::to_string(comm->rank) + " use the same " +
                                          "device " + own.bus + "; NCCL_MULTI_RANK_GPU_ENABLE=1 allows it");
  if (cudaMalloc(&comm->device_memory, 1 << 20) || cudaHostAlloc(&comm->host_memory, 4096, 0)) return ncclUnhandledCudaError;
  std::vector<char> here(comm->ranks);
  CHECK(all_gather(comm, here));              // nobody is done before everybody is
  comm->ready = true;
  counts.made++;
  return ncclSuccess;
}
inline ncclResult_t check_in(ncclComm* comm, int root_port) {
  if (!hold(init_hangs, comm->interrupt)) return ncclInternalError;
  CHECK(listen_for(comm));
  int root = -1;
  CHECK(dial(root_port, &root, comm->interrupt));
  Hello hello{comm->magic, Knock::CHECK_IN, comm->rank, comm->ranks, comm->port, RING};
  ncclResult_t told = send_all(root, &hello, sizeof hello, comm->interrupt);
  close(root);
  CHECK(told);
  Parked successor{};
  CHECK(await_knock(comm, Knock::SUCCESSOR, comm->rank, RING, &successor));
  close(successor.descriptor);
  return join_ring(comm, successor.hello.port);
}

struct Part {                                 // of a split
  int color, key, port;
};
// The ring of the members of one color; by key, then by rank. Blocks: until all ranks of the parent have called.
inline ncclResult_t split_off(ncclComm* parent, ncclComm* child, int color, int key) {
  std::vector<Part> parts(parent->ranks);
  parts[parent->rank] = {color, key, 0};
  if (child) {
    CHECK(listen_for(child));
    parts[parent->rank].port = child->port;
  }
  CHECK(all_gather(parent, parts));
  if (!child) return ncclSuccess;
  std::vector<int> members;
  for (int r = 0; r < parent->ranks; r++)
    if (parts[r].color == color) members.push_back(r);
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return parts[a].key < parts[b].key; });
  child->ranks = (int)members.size();
  child->rank = (int)(std::find(members.begin(), members.end(), parent->rank) - members.begin());
  child->magic = hash(std::to_string(parent->magic) + "/" + std::to_string(parent->children) + "/" + std::to_string(color));
  counts.splits++;
  return join_ring(child, parts[members[(child->rank + 1) % child->ranks]].port);
}

// ---- connections, made when the first operation needs them: the receiver's thread accepts, the sender's waits for that

inline ncclResult_t connect_lane(ncclComm* comm, Lane lane, const std::set<int>& to, const std::set<int>& from) {
  std::vector<std::pair<int, int>> fresh;     // peer, descriptor
  auto attempt = [&]() -> ncclResult_t {
    for (int peer : to) {
      if (comm->out.count({peer, lane})) continue;
      if (!hold(silent, comm->interrupt)) return ncclInternalError;
      if (int delay_ms = connect_delay_ms.value) {
        connect_delay_ms.fired++;
        for (int waited_ms = 0; connect_delay_ms.value && (delay_ms < 0 || waited_ms < delay_ms); waited_ms += LOOK_MS)
          if (!rest(comm->interrupt, LOOK_MS)) break;
      }
      int descriptor = -1;
      CHECK(dial(comm->peers[peer].port, &descriptor, comm->interrupt));
      fresh.push_back({peer, descriptor});
      Hello hello{comm->magic, Knock::LINK, comm->rank, comm->ranks, 0, lane};
      CHECK(send_all(descriptor, &hello, sizeof hello, comm->interrupt));
    }
    for (int peer : from) {
      if (comm->in.count({peer, lane})) continue;
      if (!hold(silent, comm->interrupt)) return ncclInternalError;
      Parked link{};
      CHECK(await_knock(comm, Knock::LINK, peer, lane, &link));
      comm->in[{peer, lane}] = link.descriptor;
      CHECK(send_all(link.descriptor, &ACCEPTED, 1, comm->interrupt));
      counts.connections++;
    }
    for (auto& [peer, descriptor] : fresh) {
      char answer = 0;
      CHECK(receive_all(descriptor, &answer, 1, comm->interrupt));
      comm->out[{peer, lane}] = descriptor;
      descriptor = -1;
    }
    return ncclSuccess;
  };
  ncclResult_t result = attempt();
  for (auto& [peer, descriptor] : fresh)
    if (descriptor >= 0) close(descriptor);
  if (comm->interrupt.aborted) return failed(ncclInternalError, "aborted while connecting");
  return result;
}

// ---- ending one

inline void free_communicator(ncclComm* comm, bool goodbye) {
  for (auto& [peer, descriptor] : comm->in) {
    if (goodbye) (void)!send(descriptor, &GOODBYE, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    close(descriptor);
  }
  for (auto& [peer, descriptor] : comm->out) close(descriptor);
  for (auto& parked : comm->parked) close(parked.descriptor);
  for (int descriptor : {comm->listener, comm->successor, comm->predecessor})
    if (descriptor >= 0) close(descriptor);
  int device = 0;
  cudaGetDevice(&device);
  cudaSetDevice(comm->device);
  if (comm->device_memory) cudaFree(comm->device_memory);      // both wait for the whole device, as NCCL's do
  if (comm->host_memory) cudaFreeHost(comm->host_memory);
  cudaSetDevice(device);
  counts.communicators--;
  delete comm;
}
// Waits for kernels and for threads that are inside, then frees it. Blocks: without an abort, until kernels end.
inline ncclResult_t reclaim(ncclComm* comm, bool abort) {
  {
    std::lock_guard<std::mutex> all(registry().lock);
    if (!registry().all.erase(comm)) return unknown();
  }
  {
    std::unique_lock<std::mutex> one(comm->lock);
    comm->moved.wait(one, [&] { return !comm->inside && comm->finished == comm->launched; });
  }
  if (abort && abort_hangs.value) {
    abort_hangs.fired++;
    while (abort_hangs.value) usleep(LOOK_MS * 1000);
  }
  free_communicator(comm, !abort);
  if (abort) counts.aborted++;
  return ncclSuccess;
}

}  // namespace fakenccl
