#define _GNU_SOURCE
/* A switch between hosts that are network namespaces, with the delay, rate and loss of a real network.
 *
 *   wire PORTS DELAY_US MBIT LOSS_PPM
 *
 * Makes the TAP devices mnw0 .. mnw<PORTS-1>, which whoever started it puts into namespaces, says "ready", and carries
 * frames between them until stdin ends. Each port sends MBIT Mbit/s at most (more than 50 ms of it queued are dropped),
 * a frame arrives DELAY_US later, or, LOSS_PPM times in a million, never. Lines on stdin: "cut N" and "heal N": nothing
 * comes through port N; "loss PPM". For machines whose kernel has no netem.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PORTS = 8, FRAME = 9216, QUEUE = 8192 };

struct frame { int64_t at_ns; int size; char bytes[FRAME]; };
struct port {
    int fd, is_cut, is_known;
    unsigned char mac[6];
    int64_t free_ns; /* when what is queued has been sent */
    struct frame *queue;
    unsigned head, tail;
};

static struct port ports[MAX_PORTS];
static int num_ports;
static int64_t delay_ns, mbit;
static double loss;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void fail(const char *what) { perror(what); exit(1); }

static void open_port(int number) {
    struct port *port = &ports[number];
    struct ifreq request = {0};
    port->fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (port->fd < 0) fail("/dev/net/tun");
    request.ifr_flags = IFF_TAP | IFF_NO_PI;
    snprintf(request.ifr_name, sizeof request.ifr_name, "mnw%d", number);
    if (ioctl(port->fd, TUNSETIFF, &request) < 0) fail("TUNSETIFF");
    port->queue = malloc(sizeof(struct frame) * QUEUE);
    if (!port->queue) fail("malloc");
}

static void send_to(struct port *to, const char *bytes, int size, int64_t now) {
    if (to->is_cut || to->tail - to->head == QUEUE || drand48() < loss) return;
    int64_t began = to->free_ns > now ? to->free_ns : now;
    if (began - now > 50000000) return;
    to->free_ns = began + size * 8000LL / mbit;
    struct frame *frame = &to->queue[to->tail++ % QUEUE];
    frame->at_ns = to->free_ns + delay_ns;
    frame->size = size;
    memcpy(frame->bytes, bytes, size);
}

static void take_from(int number, int64_t now) {
    static char bytes[FRAME];
    struct port *from = &ports[number];
    for (int count = 0; count < 64; count++) {
        int size = read(from->fd, bytes, FRAME);
        if (size <= 0) {
            if (size < 0 && errno != EAGAIN && errno != EIO && errno != EBADFD) fail("read");
            return;
        }
        if (from->is_cut || size < 14) continue;
        memcpy(from->mac, bytes + 6, 6);
        from->is_known = 1;
        int to = -1;
        for (int each = 0; each < num_ports; each++)
            if (ports[each].is_known && !memcmp(ports[each].mac, bytes, 6)) to = each;
        for (int each = 0; each < num_ports; each++)
            if (each != number && (to < 0 || to == each)) send_to(&ports[each], bytes, size, now);
    }
}

static int told(void) {
    static char lines[256];
    int size = read(0, lines, sizeof lines - 1), number;
    if (size <= 0) return 0;
    lines[size] = 0;
    for (char *line = strtok(lines, "\n"); line; line = strtok(NULL, "\n")) {
        if (sscanf(line, "cut %d", &number) == 1 && number >= 0 && number < num_ports) ports[number].is_cut = 1;
        if (sscanf(line, "heal %d", &number) == 1 && number >= 0 && number < num_ports) ports[number].is_cut = 0;
        if (sscanf(line, "loss %d", &number) == 1) loss = number / 1e6;
    }
    return 1;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    num_ports = atoi(argv[1]), delay_ns = atoll(argv[2]) * 1000, mbit = atoll(argv[3]), loss = atof(argv[4]) / 1e6;
    if (num_ports < 1 || num_ports > MAX_PORTS || mbit < 1) return 2;
    for (int number = 0; number < num_ports; number++) open_port(number);
    puts("ready");
    fflush(stdout);
    struct pollfd polled[MAX_PORTS + 1] = {{.fd = 0, .events = POLLIN}};
    for (int number = 0; number < num_ports; number++)
        polled[number + 1] = (struct pollfd){.fd = ports[number].fd, .events = POLLIN};
    for (;;) {
        int64_t now = now_ns(), next = now + 1000000000;
        for (int number = 0; number < num_ports; number++) {
            struct port *port = &ports[number];
            while (port->head != port->tail) {
                struct frame *frame = &port->queue[port->head % QUEUE];
                if (frame->at_ns > now) {
                    if (frame->at_ns < next) next = frame->at_ns;
                    break;
                }
                if (!port->is_cut && write(port->fd, frame->bytes, frame->size) < 0 && errno != EIO && errno != EAGAIN && errno != EBADFD)
                    fail("write");
                port->head++;
            }
        }
        struct timespec wait = {(next - now) / 1000000000, (next - now) % 1000000000};
        if (ppoll(polled, num_ports + 1, &wait, NULL) < 0 && errno != EINTR) fail("ppoll");
        if (polled[0].revents && !told()) return 0;
        for (int number = 0; number < num_ports; number++)
            if (polled[number + 1].revents & POLLIN) take_from(number, now_ns());
    }
}
