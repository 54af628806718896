// Streams, events, memory, generators and the order check of the simulated accelerator.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <set>
#include <thread>

namespace sim {

Settings& settings() {
  static auto* made = new Settings;
  return *made;
}

int device_count() {
  static const int n = [] {
    const char* given = getenv("SIM_DEVICES");
    return std::min(std::max(given ? atoi(given) : 2, 1), kMostDevices);
  }();
  return n;
}

// ---------------------------------------------------------------- streams

namespace {
struct World {  // everything by which streams know of one another
  std::mutex lock;
  std::vector<std::unique_ptr<Stream>> streams;
  std::map<std::pair<int, c10::StreamId>, Stream*> by_id;
  Clock host;
  std::string error[kMostDevices];
  std::vector<std::string> races;
  std::function<void(const std::string&)> on_wait;
  std::atomic<bool> is_closing{false};
  std::atomic<int> n_strays{0};
};
World& world() {
  static auto* made = new World;
  return *made;
}

void learn(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

Stream& add_stream(int device, c10::StreamId id, int priority, bool never_lazy) {  // under world's lock
  auto& w = world();
  auto made = std::make_unique<Stream>();
  made->device = device, made->id = id, made->priority = priority, made->never_lazy = never_lazy;
  made->number = int(w.streams.size());
  made->dice = 0x9e3779b97f4a7c15ull * uint64_t(made->number + 1 + getpid());
  w.by_id[{device, id}] = made.get();
  w.streams.push_back(std::move(made));
  return *w.streams.back();
}

void raise_error(int device) {
  std::string found;
  {
    Guard hold(world().lock);
    found.swap(world().error[device]);
  }
  TORCH_CHECK(found.empty(), "sim: ", found);
}

void tell_error(int device) {  // which stays
  Guard hold(world().lock);
  TORCH_CHECK(world().error[device].empty(), "sim: ", world().error[device]);
}

void note_error(int device, const std::string& name, const char* words) {
  Guard hold(world().lock);
  auto& first = world().error[device];
  if (first.empty()) first = name + " failed: " + words;
}

thread_local int the_device = 0;
const std::thread::id the_first_thread = std::this_thread::get_id();
thread_local Stream* the_streams[kMostDevices] = {};
}  // namespace

c10::Stream Stream::as_torch() const {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, c10::DeviceIndex(device)), id);
}

uint64_t Stream::give(Task task) {
  Guard hold(lock);
  if (!has_thread) {
    has_thread = true;
    std::thread([this] { live(); }).detach();
  }
  tasks.push_back(std::move(task));
  changed.notify_all();
  return ++n_given;
}

void Stream::demand(uint64_t index) {
  Guard hold(lock);
  n_demanded = std::max(n_demanded, index);
  changed.notify_all();
}

void Stream::finish(uint64_t index) {
  demand(index);
  Guard hold(lock);
  changed.wait(hold, [&] { return n_done >= index; });
}

void Stream::live() {
  for (;;) {
    Task task;
    {
      Guard hold(lock);
      changed.wait(hold, [&] {
        return !tasks.empty() && (never_lazy || !settings().lazy || n_done < n_demanded);
      });
      task = std::move(tasks.front());
      tasks.pop_front();
    }
    if (const int most = settings().delay_us; most > 0 && task.is_kernel) {
      dice = dice * 6364136223846793005ull + 1442695040888963407ull;
      usleep(useconds_t((dice >> 33) % uint64_t(most)));
    }
    try {
      if (!world().is_closing) task.run();
    } catch (const c10::Error& error) {
      note_error(device, task.name, error.what_without_backtrace());
    } catch (const std::exception& error) {
      note_error(device, task.name, error.what());
    }
    task = {};
    Guard hold(lock);
    ++n_done;
    changed.notify_all();
  }
}

Stream& find_stream(int device, c10::StreamId id) {
  Guard hold(world().lock);
  auto found = world().by_id.find({device, id});
  return found == world().by_id.end() ? add_stream(device, id, 0, false) : *found->second;
}

Stream& make_stream(int device, int priority, bool never_lazy) {
  Guard hold(world().lock);
  return add_stream(device, c10::StreamId(world().streams.size() + 1), priority, never_lazy);
}

int current_device() { return the_device; }
int exchange_device(int device) {
  TORCH_CHECK(device < device_count(), "sim: there is no device ", device);
  const int before = the_device;
  if (device >= 0) the_device = device;
  return before;
}

Stream& current_stream(int device) {
  if (device < 0) device = the_device;
  if (!the_streams[device]) the_streams[device] = &find_stream(device, 0);
  return *the_streams[device];
}

Stream& exchange_stream(Stream& stream) {
  Stream& before = current_stream(stream.device);
  the_streams[stream.device] = &stream;
  return before;
}

void close_streams() { world().is_closing = true; }

int n_strays() { return world().n_strays; }

// A thread that asks after an event opens its own current device: CUDA takes half a gigabyte of it for that.
static void asks(int device) {
  if (the_device != device && std::this_thread::get_id() != the_first_thread) ++world().n_strays;
}

// ---------------------------------------------------------------- events

MomentPtr record(Stream& stream) {
  auto moment = std::make_shared<Moment>();
  moment->stream = &stream;
  {
    Guard hold(world().lock);
    moment->clock = stream.clock;
    learn(moment->clock, world().host);
  }
  moment->index = stream.give({"record", [moment] {
    Guard hold(moment->lock);
    moment->at = std::chrono::steady_clock::now();
    moment->passed = true;
    moment->reached.notify_all();
  }, false});
  return moment;
}

static void block_until(const MomentPtr& moment) {
  moment->stream->demand(moment->index);
  Guard hold(moment->lock);
  moment->reached.wait(hold, [&] { return moment->passed; });
}

void wait(Stream& stream, const MomentPtr& moment) {
  {
    Guard hold(world().lock);
    learn(stream.clock, moment->clock);
  }
  stream.give({"wait", [moment] { block_until(moment); }, false});
}

static void host_learns(const Clock& clock) {
  Guard hold(world().lock);
  learn(world().host, clock);
}

void synchronize(const MomentPtr& moment) {
  block_until(moment);
  host_learns(moment->clock);
  raise_error(moment->stream->device);
}

void synchronize(Stream& stream) { synchronize(record(stream)); }

void synchronize(int device) {
  std::vector<Stream*> all;
  {
    Guard hold(world().lock);
    for (auto& stream : world().streams)
      if (stream->device == device && stream->has_thread) all.push_back(stream.get());
  }
  for (auto* stream : all) {
    const auto moment = record(*stream);
    block_until(moment);
    host_learns(moment->clock);
  }
  raise_error(device);
}

void on_wait(std::function<void(const std::string&)> call) { world().on_wait = std::move(call); }

void count_wait(const std::string& what) {
  if (settings().waits == 0) return;
  if (world().on_wait) world().on_wait(what);
  TORCH_CHECK(settings().waits == 1, "sim: the host waits for the device in ", what);
}

std::vector<std::string> take_races() {
  Guard hold(world().lock);
  return std::exchange(world().races, {});
}

// ---------------------------------------------------------------- memory

namespace {
constexpr size_t kRoom = size_t(64) << 30;  // addresses of one device
constexpr size_t kGrain = 512;

struct Touch {  // a task that touched a block
  Span span;
  int stream;
  uint64_t tick;
  std::string name;
};
struct Block {
  char* at;
  size_t size, asked;
  int device;
  Stream* stream;           // the one it was allocated on, and is free on
  std::set<Stream*> users;  // others, by record_stream
  std::vector<Touch> touches;
};

// Tensors point into ``addresses``, which nobody may touch; the bytes are as far into ``bytes``.
struct Spaces {
  char *addresses, *bytes;
  Spaces() {
    const size_t all = kRoom * size_t(device_count());
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* closed = mmap(nullptr, all, PROT_NONE, flags, -1, 0);
    void* open = mmap(nullptr, all, PROT_READ | PROT_WRITE, flags, -1, 0);
    TORCH_CHECK(closed != MAP_FAILED && open != MAP_FAILED, "sim: no address space");
    addresses = static_cast<char*>(closed), bytes = static_cast<char*>(open);
  }
};
Spaces& spaces() {
  static auto* made = new Spaces;
  return *made;
}
int device_of(const void* address) {
  const auto offset = static_cast<const char*>(address) - spaces().addresses;
  return offset < 0 || offset >= int64_t(kRoom) * device_count() ? -1 : int(offset / int64_t(kRoom));
}

struct Memory final : c10::DeviceAllocator {
  using Stats = c10::CachingDeviceAllocator::DeviceStats;
  struct Leaving {
    Block* block;
    std::vector<MomentPtr> until;
  };
  struct Device {
    size_t n_used = 0;  // addresses are used once: there are many
    std::map<std::pair<Stream*, size_t>, std::vector<Block*>> cache;
    std::vector<Leaving> leaving;
    Stats stats;
  };
  std::mutex lock;
  Device devices[kMostDevices];
  std::map<const char*, Block*> blocks;

  static Memory& the() {
    static auto* made = new Memory;
    return *made;
  }

  Block& block_of(const char* at) {  // under lock
    auto next = blocks.upper_bound(at);
    TORCH_CHECK(next != blocks.begin(), "sim: no memory at this address");
    return *std::prev(next)->second;
  }

  // Whether the task is ordered after all others that touched the same bytes; names both where it is not.
  std::string judge(Block& block, Stream& stream, const std::string& name, Span span) {  // under lock
    if (settings().races == 0) return "";
    Guard hold(world().lock);
    auto& clock = stream.clock;
    learn(clock, world().host);
    if (int(clock.size()) <= stream.number) clock.resize(size_t(stream.number) + 1);
    const uint64_t tick = ++clock[size_t(stream.number)];
    std::string race;
    std::vector<Touch> kept;
    for (auto& touch : block.touches) {
      const bool is_before = size_t(touch.stream) < clock.size() && clock[size_t(touch.stream)] >= touch.tick;
      const bool meets = touch.span.begin < span.end && span.begin < touch.span.end;
      if (meets && !is_before && (touch.span.writes || span.writes) && race.empty()) {
        auto words = [](const std::string& op, bool writes, const Stream& on) {
          return op + (writes ? " (writes, stream " : " (reads, stream ") + std::to_string(on.id) + " of device " +
              std::to_string(on.device) + ")";
        };
        race = "race: nothing orders " + words(name, span.writes, stream) + " after " +
            words(touch.name, touch.span.writes, *world().streams[size_t(touch.stream)]);
      }
      const bool is_covered = span.begin <= touch.span.begin && touch.span.end <= span.end;
      if (!(is_covered && is_before && (span.writes || !touch.span.writes))) kept.push_back(touch);
    }
    kept.push_back({span, stream.number, tick, name});
    block.touches = std::move(kept);
    if (!race.empty()) world().races.push_back(race);
    return race;
  }

  void fill(Block& block, const char* why) {  // what the allocator itself does to a block, in stream order
    const auto race = judge(block, *block.stream, why, {block.at, block.at + block.size, true});
    if (!race.empty() && settings().races == 2) {
      Guard hold(world().lock);
      world().error[block.device] = race;
    }
    if (settings().poison)
      block.stream->give({why, [at = host_view(block.at), n = block.size] { std::memset(at, 0xff, n); }, true});
  }

  void make_free(Block* block) {
    auto& stats = devices[block->device].stats;
    stats.active[0].decrease(1);
    stats.active_bytes[0].decrease(block->size);
    devices[block->device].cache[{block->stream, block->size}].push_back(block);
    if (settings().eager_reuse) fill(*block, "freeing memory");
  }

  void reap(int device, bool waits) {
    auto& leaving = devices[device].leaving;
    for (size_t i = 0; i < leaving.size();) {
      bool is_done = true;
      for (auto& moment : leaving[i].until) {
        if (waits) block_until(moment);
        Guard hold(moment->lock);
        is_done = is_done && moment->passed;
      }
      if (!is_done) {
        ++i;
        continue;
      }
      for (auto& moment : leaving[i].until) {
        Guard hold(world().lock);
        learn(leaving[i].block->stream->clock, moment->clock);
      }
      auto* block = leaving[i].block;
      leaving.erase(leaving.begin() + long(i));
      make_free(block);
    }
  }

  // the pages that lie in it whole: on the others are blocks that are in use
  static void drop_pages(char* at, size_t size) {
    const auto page = size_t(sysconf(_SC_PAGESIZE));
    const auto first = (size_t(at) + page - 1) / page * page, end = (size_t(at) + size) / page * page;
    if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
  }

  void drop_cache(int device) {
    auto& d = devices[device];
    for (auto& [key, list] : d.cache)
      for (Block* block : list) {
        const auto moment = record(*block->stream);
        block_until(moment);
        drop_pages(host_view(block->at), block->size);
        d.stats.reserved_bytes[0].decrease(block->size);
        d.stats.segment[0].decrease(1);
        blocks.erase(block->at);
        delete block;
      }
    d.cache.clear();
  }

  Block* fresh(Device& d, int device, size_t size, Stream& stream) {
    const auto limit = size_t(settings().capacity);
    auto reserved = [&] { return size_t(d.stats.reserved_bytes[0].current); };
    if (reserved() + size > limit) {
      ++d.stats.num_alloc_retries;
      reap(device, true);
      drop_cache(device);
    }
    if (reserved() + size > limit || d.n_used + size > kRoom) {
      ++d.stats.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", size, " bytes on device ",
          device, ", which has ", limit, " and ", d.stats.allocated_bytes[0].current, " in use");
    }
    auto* block = new Block{spaces().addresses + kRoom * size_t(device) + d.n_used, size, size, device, &stream, {}, {}};
    d.n_used += size;
    blocks[block->at] = block;
    d.stats.reserved_bytes[0].increase(size);
    d.stats.segment[0].increase(1);
    fill(*block, "new memory");
    return block;
  }

  c10::DataPtr allocate(size_t asked) override {
    const int device = current_device();
    if (asked == 0) return {nullptr, c10::Device(kSim, c10::DeviceIndex(device))};
    const size_t size = (asked + kGrain - 1) / kGrain * kGrain;
    Stream& stream = current_stream(device);
    Guard hold(lock);
    auto& d = devices[device];
    reap(device, false);
    auto& cached = d.cache[{&stream, size}];
    Block* block = cached.empty() ? nullptr : cached.back();  // the last one freed, as caches do
    if (block) {
      cached.pop_back();
      if (!settings().eager_reuse) fill(*block, "memory used again");
    } else block = fresh(d, device, size, stream);
    block->asked = asked;
    d.stats.allocation[0].increase(1);
    d.stats.active[0].increase(1);
    d.stats.allocated_bytes[0].increase(size);
    d.stats.active_bytes[0].increase(size);
    d.stats.requested_bytes[0].increase(asked);
    return {block->at, block->at, &drop, c10::Device(kSim, c10::DeviceIndex(device))};
  }

  static void drop(void* address) {
    auto& me = the();
    Guard hold(me.lock);
    Block* block = me.blocks.at(static_cast<char*>(address));
    auto& stats = me.devices[block->device].stats;
    stats.allocation[0].decrease(1);
    stats.allocated_bytes[0].decrease(block->size);
    stats.requested_bytes[0].decrease(block->asked);
    if (block->users.empty()) return me.make_free(block);
    Leaving leaving{block, {}};
    for (Stream* user : block->users) leaving.until.push_back(record(*user));
    block->users.clear();
    me.devices[block->device].leaving.push_back(std::move(leaving));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }

  void copy_data(void* to, const void* from, std::size_t n) const override {
    auto* a = static_cast<char*>(to);
    auto* b = static_cast<const char*>(from);
    launch(current_stream(device_of(to)), "copy of a storage", {{b, b + n, false}, {a, a + n, true}},
           [a = host_view(to), b = host_view(from), n] { std::memcpy(a, b, n); });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int i = 0; i < device_count(); ++i) {
      Guard hold(lock);
      reap(i, true);
      drop_cache(i);
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream s) override {
    use_on(data.get(), find_stream(s.device_index(), s.id()));
  }
  Stats getDeviceStats(c10::DeviceIndex device) override {
    Guard hold(lock);
    return devices[device].stats;
  }
  template <class F> void each_stat(int device, F call) {
    Guard hold(lock);
    auto& s = devices[device].stats;
    for (auto* stat : {&s.allocation, &s.segment, &s.active, &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes,
                       &s.requested_bytes})
      call((*stat)[0]);
  }
  void resetAccumulatedStats(c10::DeviceIndex d) override { each_stat(d, [](auto& s) { s.reset_accumulated(); }); }
  void resetPeakStats(c10::DeviceIndex d) override { each_stat(d, [](auto& s) { s.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    const auto all = size_t(settings().capacity);
    return {all - size_t(getDeviceStats(d).reserved_bytes[0].current), all};
  }
};
}  // namespace

char* host_view(const void* address) {
  if (!address) return nullptr;
  TORCH_CHECK(device_of(address) >= 0, "sim: not an address of a device");
  return spaces().bytes + (static_cast<const char*>(address) - spaces().addresses);
}

void use_on(const void* address, Stream& stream) {
  if (!address) return;
  auto& memory = Memory::the();
  Guard hold(memory.lock);
  auto& block = memory.block_of(static_cast<const char*>(address));
  if (block.stream != &stream) block.users.insert(&stream);
}

void check(Stream& stream, const std::string& name, const std::vector<Span>& spans) {
  auto& memory = Memory::the();
  for (auto& span : spans) {
    if (span.begin == span.end) continue;
    std::string race;
    {
      Guard hold(memory.lock);
      race = memory.judge(memory.block_of(span.begin), stream, name, span);
    }
    TORCH_CHECK(race.empty() || settings().races != 2, "sim: ", race);
  }
}

void launch(Stream& stream, const std::string& name, const std::vector<Span>& spans, std::function<void()> run) {
  raise_error(stream.device);
  check(stream, name, spans);
  stream.give({name, std::move(run), true});
}

// ---------------------------------------------------------------- what torch asks of an accelerator

namespace {
struct Generator final : c10::GeneratorImpl {
  uint64_t key = c10::default_rng_seed_val, n_drawn = 0;
  explicit Generator(int device)
      : GeneratorImpl(c10::Device(kSim, c10::DeviceIndex(device)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { key = seed, n_drawn = 0; }
  uint64_t current_seed() const override { return key; }
  void set_offset(uint64_t offset) override { n_drawn = offset; }
  uint64_t get_offset() const override { return n_drawn; }
  uint64_t seed() override { return set_current_seed(c10::detail::getNonDeterministicRandom()), key; }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = key, words[1] = n_drawn;
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.is_cpu() && state.numel() * int64_t(state.itemsize()) == 16, "sim: a state is 16 bytes");
    auto* words = static_cast<const uint64_t*>(state.data());
    key = words[0], n_drawn = words[1];
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->key = key, copy->n_drawn = n_drawn;
    return copy;
  }
};

struct Pinned final : c10::Allocator {  // host memory that a stream reads or writes when it comes to it
  std::mutex lock;
  std::map<const char*, size_t> sizes;
  static Pinned& the() {
    static auto* made = new Pinned;
    return *made;
  }
  static void drop(void* at) {
    Guard hold(the().lock);
    the().sizes.erase(static_cast<char*>(at));
    free(at);
  }
  c10::DataPtr allocate(size_t n) override {
    auto* at = static_cast<char*>(aligned_alloc(64, n / 64 * 64 + 64));
    Guard hold(lock);
    sizes[at] = n;
    return {at, at, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
  bool holds(const void* address) {
    auto* at = static_cast<const char*>(address);
    Guard hold(lock);
    auto next = sizes.upper_bound(at);
    return next != sizes.begin() && at <= std::prev(next)->first + std::prev(next)->second;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device()); }
  void setCurrentDevice(c10::DeviceIndex d) const override { exchange_device(d); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return c10::DeviceIndex(exchange_device(d)); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override {
    static auto* all = [] {
      auto* made = new std::vector<at::Generator>;
      for (int i = 0; i < device_count(); ++i) made->push_back(at::make_generator<Generator>(i));
      return made;
    }();
    return all->at(size_t(d < 0 ? current_device() : d));
  }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<Generator>(d < 0 ? current_device() : d);
  }
  at::Device getDeviceFromPtr(void* data) const override { return {kSim, c10::DeviceIndex(device_of(data))}; }
  bool isPinnedPtr(const void* data) const override { return Pinned::the().holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &Pinned::the(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const int before = exchange_device(storage.device().index());
    auto data = Memory::the().allocate(size);
    if (const auto n = std::min(size, storage.nbytes()); n) Memory::the().copy_data(data.get(), storage.data(), n);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
    exchange_device(before);
  }
};

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device(int index) { return {kSim, c10::DeviceIndex(index)}; }
  static int index(c10::Device d) { return d.has_index() ? d.index() : current_device(); }
  static Stream& ours(const c10::Stream& s) { return find_stream(s.device_index(), s.id()); }
  static MomentPtr& moment(void* event) { return *static_cast<MomentPtr*>(event); }

  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(device_count()); }
  c10::Device getDevice() const override { return device(current_device()); }
  c10::Device exchangeDevice(c10::Device d) const override { return device(exchange_device(d.index())); }
  void setDevice(c10::Device d) const override { exchange_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0 && d.index() < device_count()) the_device = d.index();
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    count_wait("synchronize of a device");
    synchronize(d < 0 ? current_device() : int(d));
  }

  c10::Stream getStream(c10::Device d) const override { return current_stream(index(d)).as_torch(); }
  c10::Stream getDefaultStream(c10::Device d) const override { return find_stream(index(d), 0).as_torch(); }
  c10::Stream getNewStream(c10::Device d, int priority) const override {
    return make_stream(index(d), priority, false).as_torch();
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override { return exchange_stream(ours(s)).as_torch(); }
  bool queryStream(const c10::Stream& s) const override {
    auto& stream = ours(s);
    Guard hold(stream.lock);
    return stream.n_done == stream.n_given;
  }
  void synchronizeStream(const c10::Stream& s) const override {
    count_wait("synchronize of a stream");
    synchronize(ours(s));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    use_on(data.get(), ours(s));
  }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex d, const c10::EventFlag) const override {
    TORCH_CHECK(d < 0 || d == s.device_index(), "sim: an event of device ", int(d), " on a stream of device ",
                int(s.device_index()));
    if (!*event) *event = new MomentPtr;
    moment(*event) = sim::record(ours(s));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MomentPtr*>(event);
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) sim::wait(ours(s), moment(event));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& m = moment(event);
    asks(m->stream->device);
    tell_error(m->stream->device);
    m->stream->demand(m->index);  // who asks again and again is to get an answer
    {
      Guard hold(m->lock);
      if (!m->passed) return false;
    }
    host_learns(m->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    count_wait("synchronize of an event");
    asks(moment(event)->stream->device);
    synchronize(moment(event));
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start && end && queryEvent(start) && queryEvent(end), "sim: both events must have completed");
    TORCH_CHECK(moment(start)->stream->device == moment(end)->stream->device, "sim: events of two devices");
    return std::chrono::duration<double, std::milli>(moment(end)->at - moment(start)->at).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard)
const bool is_registered = [] {
  c10::SetAllocator(kSim, &Memory::the(), 0);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
}  // namespace
}  // namespace sim
