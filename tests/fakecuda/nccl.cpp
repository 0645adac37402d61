// A stand-in for NCCL (libnccl.so.2): its C API over TCP on the loopback, with arithmetic on memory that is the host's,
// so that torch's own ProcessGroupNCCL runs where there is no GPU. Written from NCCL's header, guide and public sources
// (2.30.7); none of its code is in here. Kernels are functions on the streams of the stand-in for CUDA (streams.cpp).
//
// What it answers, and how
//   versions       2.30.7, as the header it is built with. It says so with NCCL_DEBUG=VERSION (WARN, INFO: more), on stderr.
//   unique id      starts a root: a thread and a listening socket that wait until all ranks have checked in.
//   init           blocks until all ranks are there. Sockets of the bootstrap that are shut down from outside end it with
//                  ncclSystemError (the one it listens on) or ncclRemoteError (others), and nothing of it stays.
//                  Two ranks of one host (NCCL_HOSTID) on one device are refused, but for NCCL_MULTI_RANK_GPU_ENABLE=1.
//   split          over the ring of the parent's bootstrap; blocks until all of its ranks have called.
//   connections    made by the issuing thread when the first operation needs them (at the outermost ncclGroupEnd): one ring
//                  for all collectives; for sends and receives one for each pair and direction. Either end waits for the
//                  other. A refusal is met with NCCL_SOCKET_RETRY_CNT tries, NCCL_SOCKET_RETRY_SLEEP_MSEC * n apart.
//   groups         as src/group.cc: depth per thread; the last error inside is what the outermost end gives, and then
//                  nothing of the group is launched; inits, splits and aborts inside it are carried out at its end, in
//                  threads if there are several.
//   order          kernels of one communicator run in the order of their launches, on whatever streams.
//   reductions     ((x0 + x1) + x2) + ... in the order of ranks, rounded to the type at each step, on every rank and in
//                  every run the same bits. The mean of floats: each x is multiplied by 1/ranks first, of integers: the
//                  sum is divided (towards 0). NaN in Max and Min: as comparisons give it.
//   a lost peer    is noticed by kernels that have a connection to it and wait: its neighbours in the ring, its partner.
//                  The communicator keeps ncclRemoteError (ncclCommGetAsyncError), the kernel spins until the abort; every
//                  later call with the communicator gives the error, inside of a group the group's end as well.
//   abort          ends kernels, wakes a thread that is connecting (ncclInternalError), then waits until every kernel that
//                  was launched has had its turn on its stream, and (cudaFree, cudaFreeHost) for the whole device.
//   destroy        waits for kernels without ending them: after a fault for ever. With an asynchronous error it is refused.
//   a dead context (fakecuda_break) ends kernels; calls give ncclUnhandledCudaError.
//
// What NCCL keeps and this does not: what belongs to an init that failed (the communicator, and the root's thread and
// socket); the group depth of an ncclCommDestroy that was refused. A freed communicator is refused (ncclInvalidArgument),
// where NCCL reads freed memory. The root of an id that nobody uses stays, as NCCL's.
// Each communicator has no thread of its own here (NCCL: two or more), 1 MiB of device and a page of host memory.
//
// Faults to order: int fakenccl_order(const char* fault, int value), before that from the environment FAKENCCL_<FAULT>.
//   fault             value          what happens
//   silent            1, till 0      this process sends and takes nothing more, in kernels and connecting; sockets stay open
//   abort_hangs       1, till 0      ncclCommAbort ends the kernels and does not return
//   init_hangs        1, till 0      ncclCommInitRank* blocks before it checks in at the root
//   connect_delay_ms  n; -1: till 0  each connection at first use takes so much longer; an abort ends that
//   fail_at_issue     a result code  the next operation gives this error where it is issued
//   fail_on_stream    a result code  the next kernel sets this asynchronous error and spins until the abort
// long fakenccl_count(const char* name): how often a fault struck; communicators and roots that exist now; check_ins (at
// roots here), made, aborted, splits, connections (accepted), launches, operations since the start. -1: no such name.
//
// Not here (ncclInvalidUsage; build.py makes entry points for what torch refers to): non-blocking communicators, InitAll,
// Shrink, Grow, Revoke, Suspend, MemStats, windows, device communicators, signals, SimulateEnd, reductions of 8-bit
// floats. Not imitated: transports, algorithms, protocols, NVLS, CUDA graphs, their variables; shared memory between ranks
// of a host, where a peer's death is noticed by nobody.
#include "nccl_kernels.hpp"

using namespace fakenccl;

namespace {

// ---- groups

struct Job {
  std::function<ncclResult_t()> run;
  std::function<void()> drop = [] {};         // instead, if the group has failed
};
struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Job> jobs;
  std::vector<Operation> operations;
};
thread_local Group group;

// Alone in this thread; several each in one of its own. Returns the first error.
ncclResult_t run_jobs(const std::vector<Job>& jobs) {
  if (jobs.size() == 1) return jobs[0].run();
  std::vector<ncclResult_t> results(jobs.size());
  std::vector<std::thread> threads;
  int device = 0;
  cudaGetDevice(&device);
  for (size_t i = 0; i < jobs.size(); i++)
    threads.emplace_back([&, i] {
      pthread_setname_np(pthread_self(), "fakenccl-job");
      cudaSetDevice(device);
      results[i] = jobs[i].run();
    });
  for (auto& thread : threads) thread.join();
  for (ncclResult_t result : results) CHECK(result);
  return ncclSuccess;
}
ncclResult_t connect_for(ncclComm* comm, Lane lane, const std::vector<Operation>& operations) {
  Use use(comm);
  if (!use.comm) return unknown();
  std::set<int> to, from;
  for (auto& o : operations) {
    if (o.lane() != lane || comm->ranks == 1) continue;
    if (lane == RING) {
      to.insert((comm->rank + 1) % comm->ranks);
      from.insert((comm->rank - 1 + comm->ranks) % comm->ranks);
    } else if (o.peer != comm->rank) {
      (o.kind == Kind::SEND ? to : from).insert(o.peer);
    }
  }
  return connect_lane(comm, lane, to, from);
}
ncclResult_t finish_group() {
  Group ended;
  std::swap(ended, group);
  if (ended.error) {
    for (auto& job : ended.jobs) job.drop();
    return ended.error;
  }
  std::map<std::pair<uint64_t, ncclComm*>, std::vector<Operation>> by_communicator;  // in an order all ranks share
  for (auto& o : ended.operations) by_communicator[{o.comm->magic, o.comm}].push_back(o);
  for (auto& [key, operations] : by_communicator)
    ended.jobs.push_back({[comm = key.second, &operations] { return connect_for(comm, PAIR, operations); }});
  if (!ended.jobs.empty()) CHECK(run_jobs(ended.jobs));
  for (auto& [key, operations] : by_communicator) CHECK(connect_for(key.second, RING, operations));
  for (auto& [key, operations] : by_communicator) {
    Use use(key.second);
    if (!use.comm) return unknown();
    launch(use.comm, operations);
  }
  return ncclSuccess;
}
// Every call is a group of its own, or part of one.
class Call {
 public:
  Call() { group.depth++; }
  ncclResult_t end(ncclResult_t result) {
    if (result != ncclSuccess) group.error = result;
    if (--group.depth) return result;
    ncclResult_t ended = finish_group();
    return result ? result : ended;
  }
};

// ---- communicators

// As ncclCommEnsureReady: an asynchronous error stays, and an abort that has begun is no error.
ncclResult_t ensure_ready(ncclComm* comm) {
  if (fakecuda_broken()) return failed(ncclUnhandledCudaError, "the context is dead");
  if (!comm->ready) return failed(ncclInvalidArgument, "attempt to use a communicator whose init is not done");
  if (comm->error && !comm->interrupt.aborted)
    return failed((ncclResult_t)comm->error.load(), "the communicator has met an error before");
  return ncclSuccess;
}
struct Id {                                   // what is in an ncclUniqueId
  char tag[16];
  uint64_t magic;
  int port;
};
constexpr char TAG[16] = "fakenccl";
Id read_id(const ncclUniqueId& opaque) {
  Id id;
  memcpy(&id, &opaque, sizeof id);
  return id;
}
ncclComm* fresh(ncclComm_t* out) {
  auto* comm = new ncclComm;
  cudaGetDevice(&comm->device);
  std::lock_guard<std::mutex> all(registry().lock);
  registry().all.insert(comm);
  counts.communicators++;
  return *out = comm;
}
// Runs an init; what failed leaves nothing behind.
ncclResult_t initialise(ncclComm* comm, ncclComm_t* out, const std::function<ncclResult_t()>& init) {
  ncclResult_t result;
  {
    Use use(comm);
    if (!use.comm) return unknown();
    cudaSetDevice(comm->device);
    result = init();
  }
  if (result == ncclSuccess) return result;
  *out = nullptr;
  reclaim(comm, false);
  return result;
}
void say_version(int rank) {
  static std::atomic<bool> said{false};
  if (rank == 0 && !said.exchange(true))
    log(VERSION, "NCCL version %d.%d.%d: a stand-in for it, without a GPU", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
}
ncclResult_t begin_init(ncclComm_t* out, int ranks, int rank, int ids, const ncclUniqueId* opaque, ncclConfig_t* config) {
  if (!out || !opaque || ranks < 1 || rank < 0 || rank >= ranks || ids < 1)
    return failed(ncclInvalidArgument, "rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " is none");
  if (config && config->magic != NCCL_API_MAGIC) return failed(ncclInvalidArgument, "a configuration that was not initialised");
  if (number("NCCL_COMM_BLOCKING", config ? config->blocking : 1) == 0)
    return failed(ncclInvalidUsage, "non-blocking communicators are not made here");
  std::vector<Id> all;
  for (int i = 0; i < ids; i++) all.push_back(read_id(opaque[i]));
  if (memcmp(all[0].tag, TAG, sizeof TAG)) return failed(ncclInvalidArgument, "an id that is not ncclGetUniqueId's");
  if (fakecuda_broken() || cudaFree(nullptr)) return failed(ncclUnhandledCudaError, "no CUDA");
  say_version(rank);
  ncclComm* comm = fresh(out);
  comm->rank = rank, comm->ranks = ranks, comm->magic = all[0].magic;
  auto run = [=] {
    log(INFO, "init of rank %d of %d begins, communicator %p", rank, ranks, (void*)comm);
    ncclResult_t result = initialise(comm, out, [&] { return check_in(comm, all[0].port); });
    for (auto& id : all) close_root(id.magic);  // one root serves all ranks, however many ids there are
    log(INFO, "init of communicator %p: %s", (void*)comm, ncclGetErrorString(result));
    return result;
  };
  group.jobs.push_back({run, [=] { reclaim(comm, false); }});
  return ncclSuccess;
}

// ---- operations

ncclResult_t check(const Operation& o) {
  CHECK(ensure_ready(o.comm));
  if (int ordered = fail_at_issue.take()) return failed((ncclResult_t)ordered, "fail_at_issue was ordered");
  if (!size_of(o.type)) return failed(ncclInvalidArgument, "data type " + std::to_string(o.type) + " is none");
  if (o.peer < 0 || o.peer >= o.comm->ranks)
    return failed(ncclInvalidArgument, "rank " + std::to_string(o.peer) + " is none of this communicator's");
  return ncclSuccess;
}
ncclResult_t resolve(ncclComm* comm, ncclRedOp_t op, ncclDataType_t type, Reduction* reduction) {
  if (!can_reduce(type)) return failed(ncclInvalidUsage, "8-bit floats are not reduced here");
  if (op < ncclAvg) {
    reduction->op = op;
  } else if (op == ncclAvg) {
    reduction->scaled = is_float(type);
    reduction->factor = 1.0 / comm->ranks;
    reduction->divisor = is_float(type) ? 1 : comm->ranks;
  } else {
    auto made = comm->operators.find(op);
    if (made == comm->operators.end()) return failed(ncclInvalidArgument, "no such reduction operator");
    *reduction = made->second;
  }
  return ncclSuccess;
}
ncclResult_t issue(std::vector<Operation> operations, ncclRedOp_t op = ncclSum, bool reduces = false) {
  Call call;
  auto attempt = [&]() -> ncclResult_t {
    if (operations.empty()) return ncclSuccess;
    Use use(operations[0].comm);
    if (!use.comm) return unknown();
    for (auto& o : operations) {
      CHECK(check(o));
      if (reduces) CHECK(resolve(o.comm, op, o.type, &o.reduction));
    }
    group.operations.insert(group.operations.end(), operations.begin(), operations.end());
    return ncclSuccess;
  };
  return call.end(attempt());
}
// A collective that is sends and receives: of those parts that this rank has.
template <class Parts> ncclResult_t issue_pairs(ncclComm_t comm, Parts parts) {
  std::vector<Operation> operations;
  {
    Use use(comm);
    if (use.comm)
      for (int r = 0; r < comm->ranks; r++) parts(operations, r, comm->rank);
    else
      operations.push_back({Kind::SEND, comm, nullptr, nullptr, nullptr, 0, ncclInt8, 0, {}});  // is refused
  }
  return issue(operations);
}

}  // namespace

extern "C" {

// ---- groups

ncclResult_t ncclGroupStart() {
  group.depth++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (!group.depth) return failed(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  return --group.depth ? ncclSuccess : finish_group();
}

// ---- making and ending communicators

ncclResult_t ncclGetVersion(int* version) {
  if (!version) return ncclInvalidArgument;
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
  std::random_device random;
  Id id{};
  memcpy(id.tag, TAG, sizeof TAG);
  id.magic = (uint64_t)random() << 32 | random();
  CHECK(open_root(id.magic, &id.port));
  memset(out, 0, sizeof *out);
  memcpy(out, &id, sizeof id);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  Call call;
  return call.end(begin_init(out, ranks, rank, 1, &id, config));
}
ncclResult_t ncclCommInitRank(ncclComm_t* out, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(out, ranks, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int ranks, int rank, int ids, ncclUniqueId* id, ncclConfig_t* config) {
  Call call;
  return call.end(begin_init(out, ranks, rank, ids, id, config));
}
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  Call call;
  auto attempt = [&]() -> ncclResult_t {
    Use use(parent);
    if (!use.comm || !out) return unknown();
    *out = nullptr;
    CHECK(ensure_ready(parent));
    parent->children++;
    ncclComm* child = color == NCCL_SPLIT_NOCOLOR ? nullptr : fresh(out);
    auto run = [=]() -> ncclResult_t {
      Use held(parent);
      if (!held.comm) return unknown();
      if (!child) return split_off(parent, nullptr, color, key);
      return initialise(child, out, [&] { return split_off(parent, child, color, key); });
    };
    group.jobs.push_back({run, [=] { if (child) reclaim(child, false); }});
    return ncclSuccess;
  };
  return call.end(attempt());
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  Call call;
  auto attempt = [&]() -> ncclResult_t {
    Use use(comm);
    if (!use.comm) return unknown();
    CHECK(ensure_ready(comm));
    if (comm->finalized) return failed(ncclInvalidArgument, "finalised twice");
    comm->finalized = true;
    group.jobs.push_back({[=] {
      std::unique_lock<std::mutex> one(comm->lock);
      comm->moved.wait(one, [&] { return comm->finished == comm->launched; });
      return ncclSuccess;
    }});
    return ncclSuccess;
  };
  return call.end(attempt());
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  Call call;
  auto attempt = [&]() -> ncclResult_t {
    Use use(comm);
    if (!use.comm) return unknown();
    CHECK(ensure_ready(comm));
    group.jobs.push_back({[=] { return reclaim(comm, false); }});
    return ncclSuccess;
  };
  return call.end(attempt());
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  Call call;
  auto attempt = [&]() -> ncclResult_t {
    Use use(comm);
    if (!use.comm) return unknown();
    log(INFO, "abort of communicator %p begins", (void*)comm);
    comm->interrupt.abort();                  // at once, though the rest of it waits for the end of a group
    group.jobs.push_back({[=] {
      ncclResult_t result = reclaim(comm, true);
      log(INFO, "abort of communicator %p has ended", (void*)comm);
      return result;
    }});
    return ncclSuccess;
  };
  return call.end(attempt());
}

// ---- asking

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  Use use(comm);
  if (!use.comm || !error) return unknown();
  *error = (ncclResult_t)comm->error.load();
  return ncclSuccess;
}
static ncclResult_t ask(ncclComm_t comm, int* out, int ncclComm::* field) {
  Use use(comm);
  if (!use.comm || !out) return unknown();
  CHECK(ensure_ready(comm));
  *out = comm->*field;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { return ask(comm, count, &ncclComm::ranks); }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return ask(comm, rank, &ncclComm::rank); }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) { return ask(comm, device, &ncclComm::device); }
const char* ncclGetErrorString(ncclResult_t result) {
  static const char* const texts[] = {
      "no error", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
      "unhandled system error (run with NCCL_DEBUG=INFO for details)", "internal error - please report this issue to the NCCL developers",
      "invalid argument (run with NCCL_DEBUG=WARN for details)", "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error", "NCCL operation in progress", "timeout"};
  return result >= 0 && result < ncclNumResults ? texts[result] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

// ---- memory

ncclResult_t ncclMemAlloc(void** out, size_t bytes) { return cudaMalloc(out, bytes) ? ncclUnhandledCudaError : ncclSuccess; }
ncclResult_t ncclMemFree(void* memory) { return cudaFree(memory) ? ncclUnhandledCudaError : ncclSuccess; }
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* memory, size_t, void** handle) {
  Use use(comm);
  if (!use.comm || !handle) return unknown();
  *handle = memory;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void*) {
  Use use(comm);
  return use.comm ? ncclSuccess : unknown();
}

// ---- reduction operators

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t residence,
                                      ncclComm_t comm) {
  Use use(comm);
  if (!use.comm || !op || !scalar) return unknown();
  Reduction made;
  made.scaled = true;
  if (residence == ncclScalarDevice) made.factor_at = scalar;
  else of_type(type, [&](auto* t) { made.factor = (double)widen(*(decltype(t))scalar); });
  *op = (ncclRedOp_t)(ncclNumOps + comm->operators_made++);
  comm->operators[*op] = made;
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  Use use(comm);
  if (!use.comm) return unknown();
  return comm->operators.erase(op) ? ncclSuccess : failed(ncclInvalidArgument, "no such reduction operator");
}

// ---- operations

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return issue({{Kind::ALL_REDUCE, comm, stream, (const char*)from, (char*)to, count, type, 0, {}}}, op, true);
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return issue({{Kind::REDUCE, comm, stream, (const char*)from, (char*)to, count, type, root, {}}}, op, true);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return issue({{Kind::REDUCE_SCATTER, comm, stream, (const char*)from, (char*)to, count, type, 0, {}}}, op, true);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return issue({{Kind::BROADCAST, comm, stream, (const char*)from, (char*)to, count, type, root, {}}});
}
ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return issue({{Kind::ALL_GATHER, comm, stream, (const char*)from, (char*)to, count, type, 0, {}}});
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return issue({{Kind::SEND, comm, stream, (const char*)from, nullptr, count, type, peer, {}}});
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return issue({{Kind::RECEIVE, comm, stream, nullptr, (char*)to, count, type, peer, {}}});
}
ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  size_t bytes = count * size_of(type);
  return issue_pairs(comm, [=](std::vector<Operation>& all, int peer, int) {
    all.push_back({Kind::SEND, comm, stream, (const char*)from + peer * bytes, nullptr, count, type, peer, {}});
    all.push_back({Kind::RECEIVE, comm, stream, nullptr, (char*)to + peer * bytes, count, type, peer, {}});
  });
}
ncclResult_t ncclGather(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  size_t bytes = count * size_of(type);
  return issue_pairs(comm, [=](std::vector<Operation>& all, int peer, int own) {
    if (peer == root) all.push_back({Kind::SEND, comm, stream, (const char*)from, nullptr, count, type, root, {}});
    if (own == root) all.push_back({Kind::RECEIVE, comm, stream, nullptr, (char*)to + peer * bytes, count, type, peer, {}});
  });
}
ncclResult_t ncclScatter(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         cudaStream_t stream) {
  size_t bytes = count * size_of(type);
  return issue_pairs(comm, [=](std::vector<Operation>& all, int peer, int own) {
    if (own == root) all.push_back({Kind::SEND, comm, stream, (const char*)from + peer * bytes, nullptr, count, type, peer, {}});
    if (peer == root) all.push_back({Kind::RECEIVE, comm, stream, nullptr, (char*)to, count, type, root, {}});
  });
}

// ---- faults and counts

int fakenccl_order(const char* fault, int value) {
  for (Fault* known : faults)
    if (!strcmp(known->name, fault)) return known->value = value, 0;
  return -1;
}
long fakenccl_count(const char* name) {
  for (Fault* known : faults)
    if (!strcmp(known->name, name)) return known->fired;
  const std::pair<const char*, std::atomic<long>*> all[] = {
      {"communicators", &counts.communicators}, {"roots", &counts.roots}, {"check_ins", &counts.check_ins},
      {"made", &counts.made}, {"aborted", &counts.aborted}, {"splits", &counts.splits},
      {"connections", &counts.connections}, {"launches", &counts.launches}, {"operations", &counts.operations}};
  for (auto& [known, count] : all)
    if (!strcmp(known, name)) return count->load();
  return -1;
}

}  // extern "C"
