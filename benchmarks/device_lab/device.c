/* An accelerator and its collectives as a process sees them, without either: a job with NCCL has this shape.

   A kernel and a collective are only enqueued. A thread of the library, which stands for the device, runs them in order
   and uses no processor for it. The main thread waits in `device_synchronize`: in C, on the script's own line, and it
   spins (CUDA's default) or sleeps. Data go through memory that the ranks share, as through NVLink: no connection
   shows them; or round a ring of TCP connections, as NCCL does without a better network.

   Whatever the training does, other threads go on, as those of NCCL and torch do: keep-alives between the processes each
   second, a watchdog that wakes ten times a second, and, if asked for, copies in the background. Of a process that is
   stopped they stop too. None of them needs the lock of the interpreter. */
#define _GNU_SOURCE
#include "device.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum wait_mode { SPIN, SLEEP };
enum { QUEUE = 1024, KERNEL = -1, MAX_PAYLOAD = 16384, KEEPALIVE_BYTES = 56, REPORT_BYTES = 640 };
enum { COPY_BYTES = 4 << 20, FRESH_BYTES = 1 << 20, MAPPED_EVERY = 5 };

static const double KEEPALIVE_INTERVAL = 1.0, WATCHDOG_INTERVAL = 0.1, COPY_INTERVAL = 0.5;

struct work {
    int operation;
    int group;
    int64_t bytes;
    double seconds;
    uint64_t sequence;
};

struct hello {
    int32_t rank;
    int32_t group;
};

/* The group of the connections with keep-alives. */
static const int RAS = -1;

static struct shared *shared;
static struct rank *self;
static char folder[512];
/* Where the program listens that writes reports, in the folder above that of the round. */
static struct sockaddr_un reports = {.sun_family = AF_UNIX};
static int self_rank, world, wait_mode, over_tcp, listener, exclusive = -1;
static struct work queue[QUEUE];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t arrived = PTHREAD_COND_INITIALIZER;
static uint64_t submitted, taken;
static _Atomic uint32_t completed;
static _Atomic int next_of[MAX_GROUPS], previous_of[MAX_GROUPS], ras_links[2];
static int ras_socket = -1;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

static void rest(double seconds) {
    struct timespec left = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&left, NULL);
}

static void wait_change(void *word, uint32_t known) { syscall(SYS_futex, word, FUTEX_WAIT, known, NULL, NULL, 0); }

static void announce(void *word) { syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, NULL, NULL, 0); }

static void never(void) {
    for (;;) pause();
}

/* The member of a group that is `distance` places after this rank. */
static int neighbour(uint64_t members, int distance) {
    int rank = self_rank, size = __builtin_popcountll(members);
    for (int left = (distance % size + size) % size; left > 0; left--)
        do rank = (rank + 1) % MAX_RANKS;
        while (!(members >> rank & 1));
    return rank;
}

static void start(const char *name, void *(*run)(void *)) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, NULL)) abort();
    pthread_setname_np(thread, name);
    pthread_detach(thread);
}

/* ---- connections ---- */

static void send_all(int fd, const void *data, size_t size) {
    for (const char *at = data; size > 0;) {
        ssize_t sent = send(fd, at, size, MSG_NOSIGNAL);
        if (sent <= 0) never(); /* A device waits for ever for a peer that is gone. */
        at += sent;
        size -= sent;
    }
}

static void receive_all(int fd, void *data, size_t size) {
    for (char *at = data; size > 0;) {
        ssize_t got = recv(fd, at, size, 0);
        if (got <= 0) never();
        at += got;
        size -= got;
    }
}

static void *accept_peers(void *unused) {
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        struct hello hello;
        if (fd < 0 || recv(fd, &hello, sizeof hello, MSG_WAITALL) != sizeof hello) return unused;
        *(hello.group == RAS ? &ras_links[1] : &previous_of[hello.group]) = fd;
    }
}

static int connect_to(int rank, int group) {
    struct rank *peer = &shared->ranks[rank];
    while (!__atomic_load_n(&peer->port, __ATOMIC_ACQUIRE)) rest(0.01);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(peer->port), .sin_addr.s_addr = peer->address};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) {
        perror("device: connect");
        _exit(70);
    }
    struct hello hello = {self_rank, group};
    send_all(fd, &hello, sizeof hello);
    return fd;
}

/* ---- the device ---- */

static void exchange_by_memory(const struct work *work) {
    for (int rank = 0; rank < world; rank++) {
        if (!(shared->members[work->group] >> rank & 1) || rank == self_rank) continue;
        struct rank *peer = &shared->ranks[rank];
        for (;;) {
            uint32_t known = __atomic_load_n(&shared->changes, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&peer->entered[work->group], __ATOMIC_ACQUIRE) >= work->sequence) break;
            wait_change(&shared->changes, known);
        }
        struct entry entry = peer->history[work->group][work->sequence % HISTORY];
        if (entry.operation != work->operation || entry.bytes != work->bytes) never();
    }
}

/* After as many turns as there are other ranks, each rank knows that all have entered the operation. */
static void exchange_by_tcp(const struct work *work) {
    static char data[MAX_PAYLOAD];
    uint64_t members = shared->members[work->group];
    size_t size = work->bytes < MAX_PAYLOAD ? work->bytes : MAX_PAYLOAD;
    struct work other;
    while (previous_of[work->group] < 0) rest(0.01);
    for (int turn = 1; turn < __builtin_popcountll(members); turn++) {
        send_all(next_of[work->group], work, sizeof *work);
        send_all(next_of[work->group], data, size);
        receive_all(previous_of[work->group], &other, sizeof other);
        if (other.operation != work->operation || other.bytes != work->bytes) never();
        receive_all(previous_of[work->group], data, size);
    }
}

static void collective(struct work *work) {
    int group = work->group;
    work->sequence = self->entered[group] + 1;
    self->history[group][work->sequence % HISTORY] = (struct entry){work->bytes, work->operation};
    __atomic_store_n(&self->entered[group], work->sequence, __ATOMIC_RELEASE);
    __atomic_add_fetch(&shared->changes, 1, __ATOMIC_SEQ_CST);
    announce(&shared->changes);
    if (__builtin_popcountll(shared->members[group]) > 1) (over_tcp ? exchange_by_tcp : exchange_by_memory)(work);
    self->completed[group] = work->sequence;
}

static void *run_device(void *unused) {
    for (;;) {
        pthread_mutex_lock(&lock);
        while (taken == submitted) pthread_cond_wait(&arrived, &lock);
        struct work work = queue[taken++ % QUEUE];
        pthread_mutex_unlock(&lock);
        self->works = work.operation == KERNEL;
        self->busy_since = now();
        if (work.operation == KERNEL) {
            if (exclusive >= 0) flock(exclusive, LOCK_EX);
            if (work.seconds < 0) never();
            rest(work.seconds);
            if (exclusive >= 0) flock(exclusive, LOCK_UN);
        } else {
            collective(&work);
        }
        self->busy += now() - self->busy_since;
        self->idle_since = now();
        self->busy_since = 0;
        completed++;
        announce(&completed);
    }
    return unused;
}

static void submit(struct work work) {
    pthread_mutex_lock(&lock);
    queue[submitted++ % QUEUE] = work;
    pthread_cond_signal(&arrived);
    pthread_mutex_unlock(&lock);
}

/* ---- threads that go on whatever the training does ---- */

/* Hands a client of RAS to the program that writes reports, together with the rank that was asked. */
static void forward(int client) {
    struct sockaddr_un address = reports;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int32_t rank = self_rank;
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {.head = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    memcpy(CMSG_DATA(&control.head), &client, sizeof client);
    struct iovec parts[2] = {{&rank, sizeof rank}, {folder, strlen(folder)}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2, .msg_control = &control, .msg_controllen = sizeof control};
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0) sendmsg(fd, &message, MSG_NOSIGNAL);
    close(fd);
    close(client);
}

static void tell_peers(size_t size) {
    static char message[REPORT_BYTES];
    for (int side = 0; side < 2; side++)
        if (ras_links[side] >= 0) send(ras_links[side], message, size, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void *keep_alive(void *unused) {
    char heard[65536];
    for (double due = now();;) {
        struct pollfd ready[3] = {{ras_links[0], POLLIN, 0}, {ras_links[1], POLLIN, 0}, {ras_socket, POLLIN, 0}};
        double left = due - now();
        if (left <= 0) {
            tell_peers(KEEPALIVE_BYTES);
            due = now() + KEEPALIVE_INTERVAL;
            continue;
        }
        if (poll(ready, 3, (int)(left * 1000) + 1) <= 0) continue;
        for (int side = 0; side < 2; side++) {
            if (!ready[side].revents) continue;
            if (recv(ready[side].fd, heard, sizeof heard, MSG_DONTWAIT) > 0) {
                self->heard_at = now();
                self->keepalives++;
            } else {
                ras_links[side] = -1; /* The peer has ended. */
            }
        }
        if (ready[2].revents) {
            int client = accept4(ras_socket, NULL, NULL, SOCK_CLOEXEC);
            /* The processes of the job are asked for what they know, by the same connections. */
            tell_peers(REPORT_BYTES);
            if (client >= 0) forward(client);
        }
    }
    return unused;
}

static void *watch(void *unused) {
    for (;;) rest(WATCHDOG_INTERVAL);
    return unused;
}

static void *copy(void *unused) {
    char *from = malloc(COPY_BYTES), *to = malloc(COPY_BYTES);
    memset(from, 1, COPY_BYTES);
    for (;;) {
        rest(COPY_INTERVAL);
        memcpy(to, from, COPY_BYTES);
        if (++self->copies % MAPPED_EVERY) continue;
        char *fresh = mmap(NULL, FRESH_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memset(fresh, 1, FRESH_BYTES);
        munmap(fresh, FRESH_BYTES);
    }
    return unused;
}

/* ---- what a script calls ---- */

size_t device_shared_size(void) { return sizeof(struct shared); }

/* The ranks of these bits are a group from now on; returns its number. All of them call it in the same order. */
int device_group(int group, uint64_t members) {
    shared->members[group] = members;
    if (group >= shared->groups) shared->groups = group + 1;
    if (over_tcp && members >> self_rank & 1 && __builtin_popcountll(members) > 1)
        next_of[group] = connect_to(neighbour(members, 1), group);
    return group;
}

/* Listens where NCCL does, at HOST:PORT; each process of a node listens there, and the kernel chooses one. */
static void listen_for_clients(const char *where) {
    char host[64] = "";
    int port = 0, on = 1;
    if (sscanf(where, "%63[^:]:%d", host, &port) != 2) return;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    inet_pton(AF_INET, strcmp(host, "localhost") ? host : "127.0.0.1", &address.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 64))
        close(fd);
    else
        ras_socket = fd;
}

/* Begins as one rank. `where` is the folder of the round; `interface` the network of its ranks; `ras` where clients ask
   for reports, empty for nowhere. */
int device_open(const char *where, int rank, int ranks, int device, const char *interface, const char *ras, int tcp,
                int mode, int copies, int shares_device) {
    char path[600];
    if (strlen(where) + sizeof "/../ras" > sizeof reports.sun_path) return -1;
    strcpy(folder, where);
    strcat(strcpy(reports.sun_path, where), "/../ras");
    snprintf(path, sizeof path, "%s/device", where);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ranks > MAX_RANKS || ftruncate(fd, sizeof(struct shared))) return -1;
    shared = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (shared == MAP_FAILED) return -1;
    self_rank = rank, world = ranks, over_tcp = tcp, wait_mode = mode;
    self = &shared->ranks[rank];
    memset(self, 0, sizeof *self);
    self->pid = getpid(), self->device = device, self->memory = (uint64_t)2 << 30;
    shared->world = ranks;
    for (int group = 0; group < MAX_GROUPS; group++) next_of[group] = previous_of[group] = -1;
    ras_links[0] = ras_links[1] = -1;
    if (shares_device) {
        snprintf(path, sizeof path, "%s/device-%d", where, device);
        exclusive = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    }
    struct ifreq request = {0};
    strncpy(request.ifr_name, interface, IFNAMSIZ - 1);
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (ioctl(listener, SIOCGIFADDR, &request)) return -1;
    struct sockaddr_in address = *(struct sockaddr_in *)&request.ifr_addr;
    socklen_t size = sizeof address;
    address.sin_port = 0;
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 64)) return -1;
    getsockname(listener, (struct sockaddr *)&address, &size);
    self->address = address.sin_addr.s_addr;
    start("NCCL Service", accept_peers);
    __atomic_store_n(&self->port, ntohs(address.sin_port), __ATOMIC_RELEASE);
    start("NCCL Progress", run_device);
    start("pt_nccl_watchdg", watch);
    if (copies) start("copies", copy);
    uint64_t all = ranks == 64 ? ~0ULL : (1ULL << ranks) - 1;
    if (ranks > 1) ras_links[0] = connect_to(neighbour(all, 1), RAS);
    if (*ras) listen_for_clients(ras);
    start("NCCL RAS", keep_alive);
    device_group(0, all);
    return 0;
}

/* Enqueues a kernel of so many seconds, of which a negative one never ends. */
void device_kernel(double seconds) { submit((struct work){KERNEL, 0, 0, seconds, 0}); }

/* Enqueues an operation of a group, of so many bytes. */
void device_collective(int group, int operation, long bytes) {
    self->launched[group][operation]++;
    submit((struct work){operation, group, bytes, 0, 0});
}

/* Waits until all that was enqueued is done. */
int device_synchronize(void) {
    uint32_t due = (uint32_t)submitted, done;
    while ((int32_t)((done = completed) - due) < 0) {
        if (wait_mode == SLEEP) wait_change(&completed, done);
    }
    return (int)done;
}
