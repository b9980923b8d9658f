/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * QTest test cases for free page reporting and what the used length promises,
 * and for inflation and what the bitmap promises
 *
 * The test plays the driver: it fills guest memory, gives it up, and compares
 * what the device says with what the memory reads as afterwards. A promise that
 * is not kept is the one thing that must never happen, so nearly every test
 * ends with both.
 */

#include "qemu/osdep.h"
#include <sys/mman.h>
#include "libqtest.h"
#include "libqos/libqos-malloc.h"
#include "libqos/malloc-pc.h"
#include "libqos/pci-pc.h"
#include "libqos/virtio.h"
#include "libqos/virtio-pci.h"
#include "qobject/qdict.h"
#include "qemu/bswap.h"
#include "qemu/memfd.h"
#include "qemu/units.h"
#include "standard-headers/linux/virtio_balloon.h"
#include "standard-headers/linux/virtio_config.h"
#include "standard-headers/linux/virtio_ring.h"

#define TIMEOUT_US  (60 * G_USEC_PER_SEC)

#define BIT_POISON  (1ull << VIRTIO_BALLOON_F_PAGE_POISON)
#define BIT_REPORT  (1ull << VIRTIO_BALLOON_F_REPORTING)
#define BIT_INIT    (1ull << VIRTIO_BALLOON_F_DEVICE_INIT_REPORTED)
#define BIT_INFLATE (1ull << VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE)

#define INFLATE_VQ    0
#define DEFLATE_VQ    1
/* Stats come before it; free page hinting is not offered. */
#define REPORTING_VQ  3

#define PATTERN     0x5a
#define RAM_SIZE    (128 * MiB)
/* Far above what the libqos allocator gives out for rings. */
#define BLOCK       (32 * MiB)
#define BLOCK_SIZE  (2 * MiB)

#define MACHINE     "-M pc-i440fx-10.0 -nodefaults "
#define BALLOON     "-device virtio-balloon-pci,id=balloon,addr=0x04," \
                    "free-page-reporting=on"
#define ANON        MACHINE "-m 128M " BALLOON
#define INFLATE     ANON ",device-init-on-inflate=on"

typedef struct Balloon {
    QTestState *qts;
    QGuestAllocator alloc;
    QPCIBus *bus;
    QVirtioPCIDevice *dev;
    QVirtQueue *ivq, *dvq, *vq;
} Balloon;

typedef struct Range {
    uint64_t addr;
    uint32_t len;
    bool readable;
} Range;

/* The machine, and the balloon in it as far as reading its features. */
static Balloon *balloon_new(const char *args)
{
    Balloon *b = g_new0(Balloon, 1);
    QPCIAddress addr = { .devfn = QPCI_DEVFN(4, 0) };

    b->qts = qtest_init(args);
    pc_alloc_init(&b->alloc, b->qts, 0);
    b->bus = qpci_new_pc(b->qts, &b->alloc);
    b->dev = virtio_pci_new(b->bus, &addr);
    g_assert_nonnull(b->dev);
    qvirtio_pci_device_enable(b->dev);
    qvirtio_start_device(&b->dev->vdev);
    return b;
}

/* Bring the driver up with all features that are offered but @refused. */
static void balloon_drive(Balloon *b, uint64_t refused)
{
    QVirtioDevice *vdev = &b->dev->vdev;
    uint64_t features = qvirtio_get_features(vdev);

    features &= ~(refused | QVIRTIO_F_BAD_FEATURE |
                  (1ull << VIRTIO_RING_F_INDIRECT_DESC) |
                  (1ull << VIRTIO_RING_F_EVENT_IDX));
    qvirtio_set_features(vdev, features);
    b->ivq = vdev->bus->virtqueue_setup(vdev, &b->alloc, INFLATE_VQ);
    b->dvq = vdev->bus->virtqueue_setup(vdev, &b->alloc, DEFLATE_VQ);
    b->vq = vdev->bus->virtqueue_setup(vdev, &b->alloc, REPORTING_VQ);
    qvirtio_set_driver_ok(vdev);
}

static Balloon *balloon_start(const char *args, uint64_t refused)
{
    Balloon *b = balloon_new(args);

    balloon_drive(b, refused);
    return b;
}

static void balloon_cleanup_queues(Balloon *b)
{
    if (b->vq) {
        qvirtqueue_cleanup(b->dev->vdev.bus, b->ivq, &b->alloc);
        qvirtqueue_cleanup(b->dev->vdev.bus, b->dvq, &b->alloc);
        qvirtqueue_cleanup(b->dev->vdev.bus, b->vq, &b->alloc);
    }
}

static void balloon_free(Balloon *b)
{
    balloon_cleanup_queues(b);
    qvirtio_pci_device_disable(b->dev);
    qvirtio_pci_destructor(&b->dev->obj);
    g_free(b->dev);
    qpci_free_pc(b->bus);
    alloc_destroy(&b->alloc);
    qtest_quit(b->qts);
    g_free(b);
}

static void set_poison(Balloon *b, uint32_t value)
{
    qpci_io_writel(b->dev->pdev, b->dev->bar, b->dev->device_cfg_offset +
                   offsetof(struct virtio_balloon_config, poison_val), value);
}

/* Queue one element. The ranges must be listed readable ones first. */
static void element_add(Balloon *b, QVirtQueue *vq, const Range *ranges, int n)
{
    uint32_t head = 0;
    int i;

    for (i = 0; i < n; i++) {
        uint32_t desc = qvirtqueue_add(b->qts, vq, ranges[i].addr,
                                       ranges[i].len, !ranges[i].readable,
                                       i + 1 < n);
        head = i ? head : desc;
    }
    /* The ring holds what is queued before the kick, one entry an element. */
    qvirtqueue_kick(b->qts, &b->dev->vdev, vq, head);
}

static uint32_t element_wait(Balloon *b, QVirtQueue *vq)
{
    gint64 start = g_get_monotonic_time();
    uint32_t len;

    while (!qvirtqueue_get_buf(b->qts, vq, NULL, &len)) {
        g_assert(g_get_monotonic_time() - start < TIMEOUT_US);
    }
    return len;
}

static void wait_interrupt(Balloon *b, QVirtQueue *vq)
{
    QVirtioDevice *vdev = &b->dev->vdev;
    gint64 start = g_get_monotonic_time();

    while (!vdev->bus->get_queue_isr_status(vdev, vq)) {
        g_assert(g_get_monotonic_time() - start < TIMEOUT_US);
    }
}

/* Have one element processed and return its used length. */
static uint32_t element(Balloon *b, QVirtQueue *vq, const Range *ranges, int n)
{
    uint32_t used;

    qvirtqueue_reset_pool(vq);
    element_add(b, vq, ranges, n);
    used = element_wait(b, vq);
    wait_interrupt(b, vq);
    return used;
}

static uint32_t report(Balloon *b, const Range *ranges, int n)
{
    return element(b, b->vq, ranges, n);
}

static uint32_t report_one(Balloon *b, uint64_t addr, uint32_t len)
{
    Range range = { addr, len };

    return report(b, &range, 1);
}

/* Whether the guest finds nothing but @value in [@addr, @addr + @len). */
static bool reads_as(Balloon *b, uint64_t addr, uint64_t len, uint8_t value)
{
    uint8_t buf[4096];

    /* Small pieces: libqtest is slow with long lines. */
    while (len) {
        uint64_t n = MIN(len, sizeof(buf));
        uint64_t i;

        qtest_bufread(b->qts, addr, buf, n);
        for (i = 0; i < n; i++) {
            if (buf[i] != value) {
                return false;
            }
        }
        addr += n;
        len -= n;
    }
    return true;
}

static QDict *query_property(QTestState *qts, const char *property)
{
    return qtest_qmp_assert_success_ref(
        qts, "{ 'execute': 'qom-get', 'arguments': {"
             "  'path': '/machine/peripheral/balloon',"
             "  'property': %s } }", property);
}

static QDict *query_stats(QTestState *qts)
{
    return query_property(qts, "free-page-reporting-stats");
}

/* Takes over @stats. */
static uint64_t skipped_in(QDict *stats, const char *reason)
{
    QDict *by_reason = qdict_get_qdict(stats, "skipped");
    uint64_t bytes;

    g_assert_true(qdict_haskey(by_reason, reason));
    bytes = qdict_get_int(by_reason, reason);
    qobject_unref(stats);
    return bytes;
}

static uint64_t skipped(QTestState *qts, const char *reason)
{
    return skipped_in(query_stats(qts), reason);
}

/* Report a filled block of which nothing must be promised or lost. */
static void expect_skip(Balloon *b, uint64_t addr, uint32_t len,
                        const char *reason)
{
    uint64_t before = skipped(b->qts, reason);

    qtest_memset(b->qts, addr, PATTERN, len);
    g_assert_cmphex(report_one(b, addr, len), ==, 0);
    g_assert_true(reads_as(b, addr, len, PATTERN));
    g_assert_cmpuint(skipped(b->qts, reason) - before, ==, len);
}

/* Report a filled block that must come back as zeros. */
static void expect_zero(Balloon *b, uint64_t addr, uint32_t len)
{
    qtest_memset(b->qts, addr, PATTERN, len);
    g_assert_cmphex(report_one(b, addr, len), ==, len);
    g_assert_true(reads_as(b, addr, len, 0));
}

/*
 * What is offered
 */

static void test_offered(void)
{
    static const struct {
        const char *machine;
        const char *properties;
        bool reporting;
        bool init;
    } cases[] = {
        { "pc-i440fx-10.0", "", false, false },
        { "pc-i440fx-10.0", ",x-device-init-reported=auto", false, false },
        { "pc-i440fx-10.0", ",x-device-init-reported=off", false, false },
        { "pc-i440fx-10.0", ",free-page-reporting=on", true, true },
        { "pc-i440fx-10.0",
          ",free-page-reporting=on,x-device-init-reported=auto", true, true },
        { "pc-i440fx-10.0",
          ",free-page-reporting=on,x-device-init-reported=on", true, true },
        { "pc-i440fx-10.0",
          ",free-page-reporting=on,x-device-init-reported=off", true, false },
        { "pc-i440fx-9.2", ",free-page-reporting=on", true, false },
        { "pc-i440fx-9.2",
          ",free-page-reporting=on,x-device-init-reported=on", true, true },
        { "pc-i440fx-5.1", ",free-page-reporting=on", true, false },
    };
    int i;

    for (i = 0; i < G_N_ELEMENTS(cases); i++) {
        g_autofree char *args = g_strdup_printf(
            "-M %s -nodefaults -device virtio-balloon-pci,addr=0x04%s",
            cases[i].machine, cases[i].properties);
        Balloon *b;
        uint64_t features;

        if (!qtest_has_machine(cases[i].machine)) {
            g_test_message("no machine type %s", cases[i].machine);
            continue;
        }
        b = balloon_new(args);
        features = qvirtio_get_features(&b->dev->vdev);
        g_test_message("%s", args);
        g_assert_cmpint(!!(features & BIT_REPORT), ==, cases[i].reporting);
        g_assert_cmpint(!!(features & BIT_INIT), ==, cases[i].init);
        balloon_free(b);
    }
}

/* Takes over @properties. */
static void expect_device_error(QTestState *qts, QDict *properties,
                                const char *message)
{
    QDict *rsp;

    qdict_put_str(properties, "driver", "virtio-balloon-pci");
    rsp = qtest_qmp(qts, "{ 'execute': 'device_add', 'arguments': %p }",
                    properties);
    g_assert_cmpstr(qdict_get_str(qdict_get_qdict(rsp, "error"), "desc"), ==,
                    message);
    qobject_unref(rsp);
}

static void test_refused_properties(void)
{
    QTestState *qts = qtest_init(MACHINE);
    QDict *properties = qdict_new();

    qdict_put_str(properties, "x-device-init-reported", "on");
    expect_device_error(qts, properties,
                        "'x-device-init-reported=on' requires"
                        " 'free-page-reporting=on'");
    properties = qdict_new();
    qdict_put_bool(properties, "free-page-hint", true);
    expect_device_error(qts, properties,
                        "'free-page-hint' requires 'iothread' to be set");

    /* Nothing of the refused devices is left to be asked or in the way. */
    qobject_unref(qtest_qmp_assert_failure_ref(
        qts, "{ 'execute': 'query-balloon' }"));
    qtest_qmp_device_add(qts, "virtio-balloon-pci", "good",
                         "{ 'free-page-reporting': true,"
                         "  'x-device-init-reported': 'on' }");
    qtest_qmp_assert_success(qts, "{ 'execute': 'query-balloon' }");
    qtest_quit(qts);
}

/*
 * What is promised
 */

static void test_zero(void)
{
    Balloon *b = balloon_start(ANON, 0);
    QDict *stats;

    /* A page on either side shows that no more than the block is gone. */
    qtest_memset(b->qts, BLOCK - 4096, PATTERN, BLOCK_SIZE + 8192);
    expect_zero(b, BLOCK, BLOCK_SIZE);
    g_assert_true(reads_as(b, BLOCK - 4096, 4096, PATTERN));
    g_assert_true(reads_as(b, BLOCK + BLOCK_SIZE, 4096, PATTERN));

    /* Again, now that there is nothing behind it. */
    g_assert_cmphex(report_one(b, BLOCK, BLOCK_SIZE), ==, BLOCK_SIZE);
    g_assert_true(reads_as(b, BLOCK, BLOCK_SIZE, 0));

    expect_zero(b, BLOCK, 4096);
    expect_zero(b, BLOCK, 8 * MiB);

    stats = query_stats(b->qts);
    g_assert_cmpuint(qdict_get_int(stats, "discarded"), ==,
                     2 * BLOCK_SIZE + 4096 + 8 * MiB);
    g_assert_cmpuint(qdict_get_int(stats, "zero"), ==,
                     2 * BLOCK_SIZE + 4096 + 8 * MiB);
    qobject_unref(stats);
    balloon_free(b);
}

static void test_legacy_driver(void)
{
    Balloon *b = balloon_start(ANON ",disable-modern=on", 0);

    g_assert_false(b->dev->vdev.features & (1ull << VIRTIO_F_VERSION_1));
    expect_zero(b, BLOCK, BLOCK_SIZE);
    balloon_free(b);
}

static void test_not_negotiated(void)
{
    Balloon *b = balloon_start(ANON, BIT_INIT);
    Range chain[] = {
        { BLOCK + BLOCK_SIZE, 4096, .readable = true },
        { BLOCK, BLOCK_SIZE },
    };
    QDict *stats;

    /* The memory is gone as ever, and as ever nothing is said of it. */
    qtest_memset(b->qts, BLOCK, PATTERN, BLOCK_SIZE);
    g_assert_cmphex(report_one(b, BLOCK, BLOCK_SIZE), ==, 0);
    g_assert_true(reads_as(b, BLOCK, BLOCK_SIZE, 0));

    qtest_memset(b->qts, BLOCK, PATTERN, BLOCK_SIZE);
    g_assert_cmphex(report(b, chain, 2), ==, 0);
    g_assert_true(reads_as(b, BLOCK, BLOCK_SIZE, 0));

    stats = query_stats(b->qts);
    g_assert_cmpuint(qdict_get_int(stats, "discarded"), ==, 2 * BLOCK_SIZE);
    g_assert_cmpuint(qdict_get_int(stats, "zero"), ==, 0);
    qobject_unref(stats);
    balloon_free(b);
}

static void test_renegotiated(void)
{
    Balloon *b = balloon_start(ANON, 0);

    expect_zero(b, BLOCK, BLOCK_SIZE);

    /* The next driver, say after a kexec, does not know the bit. */
    balloon_cleanup_queues(b);
    qvirtio_start_device(&b->dev->vdev);
    balloon_drive(b, BIT_INIT);
    g_assert_cmphex(report_one(b, BLOCK, BLOCK_SIZE), ==, 0);
    balloon_free(b);
}

static void test_elements(void)
{
    Balloon *b = balloon_start(ANON, 0);
    Range blocks[] = {
        { BLOCK, BLOCK_SIZE },
        { BLOCK + 2 * BLOCK_SIZE, 4096 },
        { BLOCK + 3 * BLOCK_SIZE + 1, 4096 },
        { BLOCK + 5 * BLOCK_SIZE, 3 * BLOCK_SIZE },
    };
    uint32_t used[] = { BLOCK_SIZE, 4096, 0, 3 * BLOCK_SIZE };
    int i;

    qtest_memset(b->qts, BLOCK, PATTERN, 10 * BLOCK_SIZE);
    qvirtqueue_reset_pool(b->vq);
    for (i = 0; i < G_N_ELEMENTS(blocks); i++) {
        element_add(b, b->vq, &blocks[i], 1);
    }
    for (i = 0; i < G_N_ELEMENTS(blocks); i++) {
        g_assert_cmphex(element_wait(b, b->vq), ==, used[i]);
        g_assert_true(reads_as(b, blocks[i].addr, blocks[i].len,
                               used[i] ? 0 : PATTERN));
    }
    balloon_free(b);
}

static void test_buffers_of_one_element(void)
{
    Balloon *b = balloon_start(ANON, 0);
    Range chain[] = {
        { BLOCK, BLOCK_SIZE },
        { BLOCK + 2 * BLOCK_SIZE, 4096 },
        { BLOCK + 3 * BLOCK_SIZE, BLOCK_SIZE },
    };

    qtest_memset(b->qts, BLOCK, PATTERN, 5 * BLOCK_SIZE);
    g_assert_cmphex(report(b, chain, 3), ==, 2 * BLOCK_SIZE + 4096);
    g_assert_true(reads_as(b, BLOCK, BLOCK_SIZE, 0));
    g_assert_true(reads_as(b, BLOCK + BLOCK_SIZE, BLOCK_SIZE, PATTERN));
    g_assert_true(reads_as(b, BLOCK + 2 * BLOCK_SIZE, 4096, 0));
    g_assert_true(reads_as(b, BLOCK + 3 * BLOCK_SIZE, BLOCK_SIZE, 0));

    /* One that cannot be promised, wherever it is, spoils the element. */
    chain[1].len = 4095;
    g_assert_cmphex(report(b, chain, 3), ==, 0);
    chain[1].len = 4096;
    chain[0].addr++;
    g_assert_cmphex(report(b, chain, 3), ==, 0);
    chain[0].addr--;
    chain[2].addr++;
    g_assert_cmphex(report(b, chain, 3), ==, 0);
    balloon_free(b);
}

static void test_used_length_overflow(void)
{
    /* Memory that is never touched costs nothing. */
    Balloon *b = balloon_start(MACHINE "-m 2G " BALLOON, 0);
    Range chain[] = {
        { BLOCK, 0x60000000 },
        { BLOCK, 0x60000000 },
        { BLOCK, 0x60000000 },
    };

    qtest_memset(b->qts, BLOCK, PATTERN, BLOCK_SIZE);
    g_assert_cmphex(report(b, chain, 2), ==, 0xc0000000);
    g_assert_true(reads_as(b, BLOCK, BLOCK_SIZE, 0));
    /* 0x120000000 does not fit, and 0x20000000 is not the answer. */
    g_assert_cmphex(report(b, chain, 3), ==, 0);
    balloon_free(b);
}

/*
 * What is not a report
 */

static void test_unaligned(void)
{
    Balloon *b = balloon_start(ANON, 0);

    expect_skip(b, BLOCK + 1, BLOCK_SIZE, "unaligned");
    expect_skip(b, BLOCK + 2048, 4096, "unaligned");
    expect_skip(b, BLOCK, BLOCK_SIZE - 1, "unaligned");
    expect_skip(b, BLOCK, 4097, "unaligned");
    expect_skip(b, BLOCK, 1, "unaligned");
    expect_zero(b, BLOCK, BLOCK_SIZE);
    balloon_free(b);
}

static void test_over_long(void)
{
    Balloon *b = balloon_start(ANON, 0);
    uint64_t last = RAM_SIZE - 4096;

    /* The last page is RAM, what follows is nothing. */
    qtest_memset(b->qts, last, PATTERN, 4096);
    g_assert_cmphex(report_one(b, last, 8192), ==, 0);
    g_assert_cmpuint(skipped(b->qts, "bad-address"), ==, 4096);

    /* The device is none the worse for it. */
    expect_zero(b, last, 4096);
    balloon_free(b);
}

static void test_not_ram(void)
{
    Balloon *b = balloon_start(ANON, 0);
    uint64_t rom = 4 * GiB - 4096;
    uint8_t before[4096], after[4096];

    qtest_memread(b->qts, rom, before, sizeof(before));
    g_assert_cmphex(report_one(b, rom, 4096), ==, 0);
    qtest_memread(b->qts, rom, after, sizeof(after));
    g_assert_cmpmem(before, sizeof(before), after, sizeof(after));

    g_assert_cmphex(report_one(b, 2 * GiB, 4096), ==, 0);
    g_assert_cmpuint(skipped(b->qts, "bad-address"), ==, 8192);
    balloon_free(b);
}

static void test_queue(void)
{
    Balloon *b = balloon_start(ANON, 0);
    uint64_t page = b->vq->desc & ~4095ull;

    /* A queue is in use: it is neither free nor does it stay zero. */
    g_assert_cmphex(report_one(b, page, 4096), ==, 0);
    page = b->ivq->used & ~4095ull;
    g_assert_cmphex(report_one(b, page, 4096), ==, 0);
    g_assert_cmpuint(skipped(b->qts, "bad-address"), ==, 8192);
    expect_zero(b, BLOCK, BLOCK_SIZE);
    balloon_free(b);
}

static void test_readable_buffers(void)
{
    Balloon *b = balloon_start(ANON, 0);
    Range mixed[] = {
        { BLOCK + BLOCK_SIZE, 4096, .readable = true },
        { BLOCK, BLOCK_SIZE },
    };

    qtest_memset(b->qts, BLOCK, PATTERN, 2 * BLOCK_SIZE);
    g_assert_cmphex(report(b, mixed, 2), ==, 0);
    g_assert_cmphex(report(b, mixed, 1), ==, 0);
    g_assert_true(reads_as(b, BLOCK, 2 * BLOCK_SIZE, PATTERN));
    g_assert_cmpuint(skipped(b->qts, "readable-buffer"), ==, BLOCK_SIZE);
    expect_zero(b, BLOCK, BLOCK_SIZE);
    balloon_free(b);
}

static void test_poison(void)
{
    Balloon *b = balloon_start(ANON, 0);

    /* Negotiated with a value of 0, which is what the device fills with. */
    set_poison(b, 0);
    expect_zero(b, BLOCK, BLOCK_SIZE);
    set_poison(b, 0xaaaaaaaa);
    expect_skip(b, BLOCK, BLOCK_SIZE, "page-poison");
    set_poison(b, 0);
    expect_zero(b, BLOCK, BLOCK_SIZE);
    balloon_free(b);

    /* Not negotiated: the guest cannot expect anything from its value. */
    b = balloon_start(ANON, BIT_POISON);
    set_poison(b, 0xaaaaaaaa);
    expect_zero(b, BLOCK, BLOCK_SIZE);
    balloon_free(b);
}

/*
 * What is behind the memory
 */

static Balloon *balloon_on(const char *backend, uint64_t refused)
{
    g_autofree char *args = g_strdup_printf(
        "-M pc-i440fx-10.0,memory-backend=ram -nodefaults -m 128M "
        "-object %s,id=ram,size=128M " BALLOON ",device-init-on-inflate=on",
        backend);

    return balloon_start(args, refused);
}

static void expect_discard_without_promise(Balloon *b)
{
    QDict *stats;

    qtest_memset(b->qts, BLOCK, PATTERN, BLOCK_SIZE);
    g_assert_cmphex(report_one(b, BLOCK, BLOCK_SIZE), ==, 0);
    stats = query_stats(b->qts);
    g_assert_cmpuint(qdict_get_int(stats, "discarded"), ==, BLOCK_SIZE);
    g_assert_cmpuint(qdict_get_int(stats, "zero"), ==, 0);
    qobject_unref(stats);
}

static void test_anonymous(void)
{
    Balloon *b = balloon_on("memory-backend-ram,share=off", 0);

    expect_zero(b, BLOCK, BLOCK_SIZE);
    balloon_free(b);

    b = balloon_on("memory-backend-ram,share=on", 0);
    expect_zero(b, BLOCK, BLOCK_SIZE);
    balloon_free(b);
}

static void test_memfd(void)
{
    Balloon *b;

    if (!qemu_memfd_check(0)) {
        g_test_skip("no memfd");
        return;
    }

    b = balloon_on("memory-backend-memfd,share=on", 0);
    expect_zero(b, BLOCK, BLOCK_SIZE);
    balloon_free(b);

    b = balloon_on("memory-backend-memfd,share=off", 0);
    expect_discard_without_promise(b);
    balloon_free(b);
}

static void test_file(void)
{
    g_autofree char *path = NULL;
    g_autofree char *shared = NULL;
    g_autofree char *private = NULL;
    GError *err = NULL;
    int fd = g_file_open_tmp("virtio-balloon-ram-XXXXXX", &path, &err);
    Balloon *b;

    g_assert_no_error(err);
    if (ftruncate(fd, RAM_SIZE) ||
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096)) {
        g_test_skip("no holes in files here");
        goto out;
    }

    shared = g_strdup_printf("memory-backend-file,share=on,mem-path=%s", path);
    b = balloon_on(shared, 0);
    expect_zero(b, BLOCK, BLOCK_SIZE);
    balloon_free(b);

    private = g_strdup_printf("memory-backend-file,share=off,mem-path=%s",
                              path);
    b = balloon_on(private, 0);
    expect_discard_without_promise(b);
    balloon_free(b);
out:
    close(fd);
    unlink(path);
}

static void test_discard_fails(void)
{
    g_autofree char *backend = NULL;
    int fd = memfd_create("virtio-balloon-ram", MFD_ALLOW_SEALING);
    Balloon *b;

    if (fd < 0) {
        g_test_skip("no memfd");
        return;
    }
    g_assert_cmpint(ftruncate(fd, RAM_SIZE), ==, 0);
    backend = g_strdup_printf(
        "memory-backend-file,share=on,mem-path=/proc/%d/fd/%d", getpid(), fd);
    b = balloon_on(backend, 0);
    expect_zero(b, BLOCK, BLOCK_SIZE);

    /* The guest can go on writing, but nobody can punch holes any more. */
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)) {
        g_test_skip("no F_SEAL_FUTURE_WRITE");
    } else {
        expect_skip(b, BLOCK, BLOCK_SIZE, "discard-failed");
    }
    balloon_free(b);
    close(fd);
}

static uint64_t free_huge_pages(void)
{
    g_autofree char *text = NULL;

    if (!g_file_get_contents("/sys/kernel/mm/hugepages/hugepages-2048kB/"
                             "free_hugepages", &text, NULL, NULL)) {
        return 0;
    }
    return g_ascii_strtoull(text, NULL, 10);
}

static void test_hugetlb(void)
{
    Balloon *b;

    if (!qemu_memfd_check(MFD_HUGETLB) || free_huge_pages() < 64) {
        g_test_skip("needs 64 free huge pages of 2 MiB");
        return;
    }

    b = balloon_on("memory-backend-memfd,share=on,hugetlb=on,hugetlbsize=2M",
                   0);
    expect_zero(b, BLOCK, BLOCK_SIZE);
    expect_zero(b, BLOCK, 4 * BLOCK_SIZE);
    /* The pages of the guest are smaller than those of the host. */
    expect_skip(b, BLOCK, 4096, "unaligned");
    expect_skip(b, BLOCK + 4096, BLOCK_SIZE, "unaligned");
    expect_skip(b, BLOCK, BLOCK_SIZE + 4096, "unaligned");
    balloon_free(b);

    b = balloon_on("memory-backend-memfd,share=off,hugetlb=on,hugetlbsize=2M",
                   0);
    expect_discard_without_promise(b);
    balloon_free(b);
}

/* One buffer that goes from one RAM block to the next. */
static void test_two_backends(void)
{
    const char *second[] = {
        "memory-backend-ram", "memory-backend-memfd,share=off"
    };
    int i;

    for (i = 0; i < 2; i++) {
        g_autofree char *args = g_strdup_printf(
            MACHINE "-m 128M -smp 2,sockets=2 "
            "-object memory-backend-ram,id=m0,size=64M "
            "-object %s,id=m1,size=64M "
            "-numa node,nodeid=0,cpus=0,memdev=m0 "
            "-numa node,nodeid=1,cpus=1,memdev=m1 " BALLOON, second[i]);
        Balloon *b = balloon_start(args, 0);
        uint64_t addr = 64 * MiB - 4096;

        if (i == 0) {
            expect_zero(b, addr, 8192);
        } else {
            g_assert_cmphex(report_one(b, addr, 8192), ==, 0);
        }
        balloon_free(b);
    }
}

/*
 * Inflation
 */

/* What an inflate request in these tests has at most, in pages */
#define MAX_PAGES     1100
#define PAGE          4096
/* In the bitmap before the device gets it, and where it has no business. */
#define UNTOUCHED     0xc5

/* Fill @n pages, starting with page frame @pfn. */
static void fill_pages(Balloon *b, uint32_t pfn, unsigned int n)
{
    qtest_memset(b->qts, (uint64_t)pfn * PAGE, PATTERN, (size_t)n * PAGE);
}

static bool page_reads_as(Balloon *b, uint32_t pfn, uint8_t value)
{
    return reads_as(b, (uint64_t)pfn * PAGE, PAGE, value);
}

/*
 * Inflate @n pages with room for a bitmap of @size bytes. Returns the used
 * length; @bitmap has all that is there afterwards, and must hold @size bytes.
 */
static uint32_t inflate(Balloon *b, const uint32_t *pfns, unsigned int n,
                        uint8_t *bitmap, size_t size)
{
    uint64_t array = guest_alloc(&b->alloc, MAX_PAGES * sizeof(*pfns));
    uint64_t answer = guest_alloc(&b->alloc, MAX_PAGES);
    g_autofree uint32_t *le = g_new(uint32_t, n + 1);
    Range ranges[2];
    int nranges = 0;
    uint32_t used;
    unsigned int i;

    g_assert_cmpuint(n, <=, MAX_PAGES);
    for (i = 0; i < n; i++) {
        le[i] = cpu_to_le32(pfns[i]);
    }
    if (n) {
        qtest_memwrite(b->qts, array, le, n * sizeof(*le));
        ranges[nranges++] = (Range) {
            array, n * sizeof(*le), .readable = true
        };
    }
    qtest_memset(b->qts, answer, UNTOUCHED, MAX_PAGES);
    if (size) {
        ranges[nranges++] = (Range) { answer, size };
    }

    used = element(b, b->ivq, ranges, nranges);
    if (size) {
        qtest_memread(b->qts, answer, bitmap, size);
    }
    /* Never past the end of the buffer. */
    g_assert_true(reads_as(b, answer + size, MAX_PAGES - size, UNTOUCHED));
    guest_free(&b->alloc, array);
    guest_free(&b->alloc, answer);
    return used;
}

static uint64_t inflate_skipped(Balloon *b, const char *reason)
{
    return skipped_in(query_property(b->qts, "inflate-stats"), reason);
}

static uint64_t inflate_counted(Balloon *b, const char *name)
{
    QDict *stats = query_property(b->qts, "inflate-stats");
    uint64_t bytes = qdict_get_int(stats, name);

    qobject_unref(stats);
    return bytes;
}

/* Fill and inflate @n pages, of which all must become zero and be called so. */
static void expect_inflated(Balloon *b, uint32_t pfn, unsigned int n)
{
    g_autofree uint32_t *pfns = g_new(uint32_t, n);
    g_autofree uint8_t *bitmap = g_malloc(n);
    unsigned int i;

    fill_pages(b, pfn, n);
    for (i = 0; i < n; i++) {
        pfns[i] = pfn + i;
    }
    g_assert_cmpuint(inflate(b, pfns, n, bitmap, n), ==, DIV_ROUND_UP(n, 8));
    for (i = 0; i < n; i++) {
        g_assert_true(bitmap[i / 8] & (1 << (i % 8)));
        g_assert_true(page_reads_as(b, pfns[i], 0));
    }
    /* No claim for pages that do not exist. */
    for (; i % 8; i++) {
        g_assert_false(bitmap[i / 8] & (1 << (i % 8)));
    }
    for (i = DIV_ROUND_UP(n, 8); i < n; i++) {
        g_assert_cmphex(bitmap[i], ==, UNTOUCHED);
    }
}

/* Fill and inflate @n pages, of which none may be called zero. */
static void expect_no_claim(Balloon *b, uint32_t pfn, unsigned int n,
                            uint8_t reads)
{
    g_autofree uint32_t *pfns = g_new(uint32_t, n);
    g_autofree uint8_t *bitmap = g_malloc(n);
    unsigned int i;

    fill_pages(b, pfn, n);
    for (i = 0; i < n; i++) {
        pfns[i] = pfn + i;
    }
    g_assert_cmpuint(inflate(b, pfns, n, bitmap, n), ==, DIV_ROUND_UP(n, 8));
    for (i = 0; i < DIV_ROUND_UP(n, 8); i++) {
        g_assert_cmphex(bitmap[i], ==, 0);
    }
    for (i = 0; i < n; i++) {
        g_assert_true(page_reads_as(b, pfns[i], reads));
    }
}

#define PFN  (BLOCK / PAGE)

static void test_inflate_offered(void)
{
    static const struct {
        const char *properties;
        bool init;
    } cases[] = {
        { "", false },
        { ",free-page-reporting=on", false },
        { ",device-init-on-inflate=off", false },
        { ",device-init-on-inflate=on", true },
        { ",device-init-on-inflate=on,free-page-reporting=on", true },
    };
    int i;

    for (i = 0; i < G_N_ELEMENTS(cases); i++) {
        g_autofree char *args = g_strdup_printf(
            MACHINE "-device virtio-balloon-pci,addr=0x04%s",
            cases[i].properties);
        Balloon *b = balloon_new(args);
        uint64_t features = qvirtio_get_features(&b->dev->vdev);

        g_test_message("%s", args);
        g_assert_cmpint(!!(features & BIT_INFLATE), ==, cases[i].init);
        balloon_free(b);
    }
}

static void test_inflate_zero(void)
{
    static const unsigned int counts[] = { 1, 7, 8, 9, 255, 256, 257, 1024 };
    Balloon *b = balloon_start(INFLATE, 0);
    uint64_t total = 0;
    int i;

    /* A page on either side shows that no more is gone. */
    for (i = 0; i < G_N_ELEMENTS(counts); i++) {
        fill_pages(b, PFN - 1, counts[i] + 2);
        expect_inflated(b, PFN, counts[i]);
        g_assert_true(page_reads_as(b, PFN - 1, PATTERN));
        g_assert_true(page_reads_as(b, PFN + counts[i], PATTERN));
        total += counts[i] * PAGE;
    }
    g_assert_cmpuint(inflate_counted(b, "discarded"), ==, total);
    g_assert_cmpuint(inflate_counted(b, "zero"), ==, total);
    balloon_free(b);
}

/* Pages in any order, with others that cannot be had between them. */
static void test_inflate_bit_order(void)
{
    uint32_t nowhere = 2 * GiB / PAGE, rom = 0xfffff;
    uint32_t pfns[] = {
        nowhere, PFN + 9, PFN + 1, rom, PFN + 3, PFN + 2, 0xffffffff, PFN + 4,
        PFN + 8, nowhere, PFN + 5, PFN + 1, PFN + 6, PFN + 7, rom, rom,
        nowhere, PFN,
    };
    static const uint8_t expected[] = { 0xb6, 0x3d, 0x02 };
    Balloon *b = balloon_start(INFLATE, 0);
    uint8_t bitmap[3];

    fill_pages(b, PFN, 10);
    g_assert_cmpuint(inflate(b, pfns, ARRAY_SIZE(pfns), bitmap, 3), ==, 3);
    g_assert_cmpmem(bitmap, 3, expected, 3);
    g_assert_true(reads_as(b, BLOCK, 10 * PAGE, 0));
    g_assert_cmpuint(inflate_skipped(b, "bad-address"), ==, 7 * PAGE);
    balloon_free(b);
}

static void test_inflate_what_is_written(void)
{
    Balloon *b = balloon_start(INFLATE, 0);
    uint64_t array = guest_alloc(&b->alloc, PAGE);
    uint64_t answer = guest_alloc(&b->alloc, PAGE);
    uint32_t pfns[] = {
        cpu_to_le32(PFN), cpu_to_le32(answer / PAGE),
        cpu_to_le32(b->ivq->used / PAGE), cpu_to_le32(PFN + 1),
    };
    Range ranges[] = {
        { array, sizeof(pfns), .readable = true },
        { answer, 1 },
    };
    uint8_t bitmap;

    /* The answer cannot say that it is zero itself, nor can the used ring. */
    fill_pages(b, PFN, 2);
    qtest_memwrite(b->qts, array, pfns, sizeof(pfns));
    g_assert_cmpuint(element(b, b->ivq, ranges, 2), ==, 1);
    qtest_memread(b->qts, answer, &bitmap, 1);
    g_assert_cmphex(bitmap, ==, 0x09);
    g_assert_cmpuint(inflate_skipped(b, "bad-address"), ==, 2 * PAGE);
    guest_free(&b->alloc, array);
    guest_free(&b->alloc, answer);
    balloon_free(b);
}

static void test_inflate_not_negotiated(void)
{
    Balloon *b = balloon_start(INFLATE, BIT_INFLATE);
    uint32_t pfns[] = { PFN, PFN + 1, PFN + 2 };
    uint8_t bitmap[1];

    /* The memory is gone as ever, and as ever nothing is said of it. */
    fill_pages(b, PFN, 3);
    g_assert_cmpuint(inflate(b, pfns, 3, NULL, 0), ==, 0);
    g_assert_true(reads_as(b, BLOCK, 3 * PAGE, 0));
    fill_pages(b, PFN, 3);
    g_assert_cmpuint(inflate(b, pfns, 3, bitmap, 1), ==, 0);
    g_assert_cmphex(bitmap[0], ==, UNTOUCHED);
    g_assert_true(reads_as(b, BLOCK, 3 * PAGE, 0));
    g_assert_cmpuint(inflate_counted(b, "discarded"), ==, 6 * PAGE);
    g_assert_cmpuint(inflate_counted(b, "zero"), ==, 0);
    balloon_free(b);
}

static void test_inflate_no_room(void)
{
    Balloon *b = balloon_start(INFLATE, 0);
    g_autofree uint32_t *pfns = g_new(uint32_t, MAX_PAGES);
    uint8_t bitmap[MAX_PAGES];
    unsigned int i;

    for (i = 0; i < MAX_PAGES; i++) {
        pfns[i] = PFN + i;
    }

    /* None at all, and one that is too short by a byte. */
    fill_pages(b, PFN, 17);
    g_assert_cmpuint(inflate(b, pfns, 17, NULL, 0), ==, 0);
    g_assert_true(reads_as(b, BLOCK, 17 * PAGE, 0));
    fill_pages(b, PFN, 17);
    g_assert_cmpuint(inflate(b, pfns, 17, bitmap, 2), ==, 0);
    g_assert_cmphex(bitmap[0], ==, UNTOUCHED);
    g_assert_cmphex(bitmap[1], ==, UNTOUCHED);
    g_assert_true(reads_as(b, BLOCK, 17 * PAGE, 0));

    /* More pages than anybody asks about at once. */
    fill_pages(b, PFN, 1025);
    g_assert_cmpuint(inflate(b, pfns, 1025, bitmap, 1025), ==, 0);
    g_assert_cmphex(bitmap[0], ==, UNTOUCHED);
    g_assert_true(reads_as(b, BLOCK, 1025 * PAGE, 0));

    /* Nothing to ask. */
    g_assert_cmpuint(inflate(b, pfns, 0, bitmap, 8), ==, 0);
    g_assert_cmphex(bitmap[0], ==, UNTOUCHED);

    g_assert_cmpuint(inflate_counted(b, "zero"), ==, 0);
    expect_inflated(b, PFN, 17);
    balloon_free(b);
}

/* Buffers of a request may be cut anywhere. */
static void test_inflate_scattered(void)
{
    Balloon *b = balloon_start(INFLATE, 0);
    uint64_t array = guest_alloc(&b->alloc, PAGE);
    uint64_t answer = guest_alloc(&b->alloc, PAGE);
    Range chain[] = {
        { array, 6, .readable = true },
        { array + 6, 1, .readable = true },
        /* Ten page frame numbers and a half. */
        { array + 7, 35, .readable = true },
        { answer, 1 },
        { answer + 64, 1 },
    };
    uint8_t bits[65];
    uint32_t pfns[11];
    int i;

    for (i = 0; i < ARRAY_SIZE(pfns); i++) {
        pfns[i] = cpu_to_le32(i == 3 ? 2 * GiB / PAGE : PFN + i);
    }
    qtest_memwrite(b->qts, array, pfns, sizeof(pfns));
    qtest_memset(b->qts, answer, UNTOUCHED, PAGE);
    fill_pages(b, PFN, 11);

    g_assert_cmpuint(element(b, b->ivq, chain, ARRAY_SIZE(chain)), ==, 2);
    qtest_memread(b->qts, answer, bits, sizeof(bits));
    g_assert_cmphex(bits[0], ==, 0xf7);
    g_assert_cmphex(bits[1], ==, UNTOUCHED);
    g_assert_cmphex(bits[64], ==, 0x03);
    g_assert_true(reads_as(b, BLOCK, 3 * PAGE, 0));
    g_assert_true(page_reads_as(b, PFN + 3, PATTERN));
    g_assert_true(reads_as(b, BLOCK + 4 * PAGE, 6 * PAGE, 0));
    g_assert_true(page_reads_as(b, PFN + 10, PATTERN));
    balloon_free(b);
}

/* Deflation makes no promises, whatever the guest brings along. */
static void test_deflate(void)
{
    Balloon *b = balloon_start(INFLATE, 0);
    uint64_t array = guest_alloc(&b->alloc, PAGE);
    uint64_t answer = guest_alloc(&b->alloc, PAGE);
    Range chain[] = { { array, 4, .readable = true }, { answer, 1 } };

    expect_inflated(b, PFN, 1);
    qtest_writel(b->qts, array, PFN);
    qtest_memset(b->qts, answer, UNTOUCHED, 1);
    g_assert_cmpuint(element(b, b->dvq, chain, 2), ==, 0);
    g_assert_cmphex(qtest_readb(b->qts, answer), ==, UNTOUCHED);
    g_assert_true(page_reads_as(b, PFN, 0));
    balloon_free(b);
}

static void test_inflate_poison(void)
{
    Balloon *b = balloon_start(INFLATE, 0);

    set_poison(b, 0);
    expect_inflated(b, PFN, 9);
    /* It is taken as ever. The guest did not say that it wants zeros there. */
    set_poison(b, 0xaaaaaaaa);
    expect_no_claim(b, PFN, 9, 0);
    set_poison(b, 0);
    expect_inflated(b, PFN, 9);
    balloon_free(b);
}

static void expect_inflated_without_promise(Balloon *b)
{
    g_autofree uint8_t *bitmap = g_malloc(9);
    uint32_t pfns[9];
    int i;

    for (i = 0; i < 9; i++) {
        pfns[i] = PFN + i;
    }
    fill_pages(b, PFN, 9);
    g_assert_cmpuint(inflate(b, pfns, 9, bitmap, 2), ==, 2);
    g_assert_cmphex(bitmap[0] | bitmap[1], ==, 0);
    g_assert_cmpuint(inflate_counted(b, "discarded"), ==, 9 * PAGE);
    g_assert_cmpuint(inflate_counted(b, "zero"), ==, 0);
}

static void test_inflate_backends(void)
{
    Balloon *b = balloon_on("memory-backend-ram,share=on", 0);

    expect_inflated(b, PFN, 9);
    balloon_free(b);

    if (!qemu_memfd_check(0)) {
        g_test_skip("no memfd");
        return;
    }
    b = balloon_on("memory-backend-memfd,share=on", 0);
    expect_inflated(b, PFN, 9);
    balloon_free(b);

    b = balloon_on("memory-backend-memfd,share=off", 0);
    expect_inflated_without_promise(b);
    balloon_free(b);
}

static void test_inflate_discard_fails(void)
{
    g_autofree char *backend = NULL;
    int fd = memfd_create("virtio-balloon-ram", MFD_ALLOW_SEALING);
    Balloon *b;

    if (fd < 0) {
        g_test_skip("no memfd");
        return;
    }
    g_assert_cmpint(ftruncate(fd, RAM_SIZE), ==, 0);
    backend = g_strdup_printf(
        "memory-backend-file,share=on,mem-path=/proc/%d/fd/%d", getpid(), fd);
    b = balloon_on(backend, 0);
    expect_inflated(b, PFN, 9);
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)) {
        g_test_skip("no F_SEAL_FUTURE_WRITE");
    } else {
        expect_no_claim(b, PFN, 9, PATTERN);
        g_assert_cmpuint(inflate_skipped(b, "discard-failed"), ==, 9 * PAGE);
    }
    balloon_free(b);
    close(fd);
}

/* One request about two RAM blocks, of which one can be promised. */
static void test_inflate_two_backends(void)
{
    Balloon *b = balloon_start(
        MACHINE "-m 128M -smp 2,sockets=2 "
        "-object memory-backend-ram,id=m0,size=64M "
        "-object memory-backend-memfd,share=off,id=m1,size=64M "
        "-numa node,nodeid=0,cpus=0,memdev=m0 "
        "-numa node,nodeid=1,cpus=1,memdev=m1 " BALLOON
        ",device-init-on-inflate=on", 0);
    uint32_t first = 64 * MiB / PAGE;
    uint32_t pfns[] = { first, first - 1, first + 1, first - 2, first - 3 };
    uint8_t bitmap[1];

    fill_pages(b, first - 3, 5);
    g_assert_cmpuint(inflate(b, pfns, ARRAY_SIZE(pfns), bitmap, 1), ==, 1);
    g_assert_cmphex(bitmap[0], ==, 0x1a);
    g_assert_true(reads_as(b, 64 * MiB - 3 * PAGE, 3 * PAGE, 0));
    g_assert_cmpuint(inflate_counted(b, "discarded"), ==, 5 * PAGE);
    g_assert_cmpuint(inflate_counted(b, "zero"), ==, 3 * PAGE);
    balloon_free(b);
}

/* Pages of the host that are 512 times those of the balloon. */
#define PIECES  (BLOCK_SIZE / PAGE)

static void test_inflate_hugetlb(void)
{
    g_autofree uint32_t *pfns = g_new(uint32_t, 2 * PIECES + 4);
    uint8_t bitmap[2 * PIECES / 8];
    uint64_t discarded, zero;
    unsigned int i;
    Balloon *b;

    if (!qemu_memfd_check(MFD_HUGETLB) || free_huge_pages() < 64) {
        g_test_skip("needs 64 free huge pages of 2 MiB");
        return;
    }
    b = balloon_on("memory-backend-memfd,share=on,hugetlb=on,hugetlbsize=2M",
                   0);

    /* Two of them by turns, one from its end: 7 is coprime to their number. */
    for (i = 0; i < PIECES; i++) {
        pfns[2 * i] = PFN + i * 7 % PIECES;
        pfns[2 * i + 1] = PFN + 2 * PIECES - 1 - i;
    }
    fill_pages(b, PFN, 2 * PIECES);
    g_assert_cmpuint(inflate(b, pfns, 2 * PIECES, bitmap, sizeof(bitmap)), ==,
                     sizeof(bitmap));
    for (i = 0; i < sizeof(bitmap); i++) {
        g_assert_cmphex(bitmap[i], ==, 0xff);
    }
    g_assert_true(reads_as(b, BLOCK, 2 * BLOCK_SIZE, 0));

    /* One piece is missing, and another comes twice: nothing happens. */
    fill_pages(b, PFN, 2 * PIECES);
    pfns[0] = pfns[2];
    g_assert_cmpuint(inflate(b, pfns, 2 * PIECES, bitmap, sizeof(bitmap)), ==,
                     sizeof(bitmap));
    for (i = 0; i < sizeof(bitmap); i++) {
        /* The other one has all of its pieces, at the odd places. */
        g_assert_cmphex(bitmap[i], ==, 0xaa);
    }
    g_assert_true(reads_as(b, BLOCK, BLOCK_SIZE, PATTERN));
    g_assert_true(reads_as(b, BLOCK + BLOCK_SIZE, BLOCK_SIZE, 0));
    g_assert_cmpuint(inflate_skipped(b, "partial-host-page"), ==, BLOCK_SIZE);

    /*
     * Its pieces come in two requests. In between the guest may have taken the
     * first back: it must not be discarded, and nothing claimed.
     */
    expect_no_claim(b, PFN, PIECES / 2, PATTERN);
    expect_no_claim(b, PFN + PIECES / 2, PIECES / 2, PATTERN);
    g_assert_true(reads_as(b, BLOCK, BLOCK_SIZE, PATTERN));
    g_assert_cmpuint(inflate_skipped(b, "partial-host-page"), ==,
                     2 * BLOCK_SIZE);

    /*
     * No answer to so many pages. They are discarded and counted all the same,
     * and here a piece that comes twice is one.
     */
    pfns[0] = PFN;
    for (i = 0; i < 3; i++) {
        pfns[2 * PIECES + i] = PFN + 2 * PIECES + 7 * i;
    }
    pfns[2 * PIECES + 3] = pfns[2 * PIECES];
    discarded = inflate_counted(b, "discarded");
    zero = inflate_counted(b, "zero");
    fill_pages(b, PFN, 3 * PIECES);
    g_assert_cmpuint(inflate(b, pfns, 2 * PIECES + 4, bitmap, sizeof(bitmap)),
                     ==, 0);
    for (i = 0; i < sizeof(bitmap); i++) {
        g_assert_cmphex(bitmap[i], ==, UNTOUCHED);
    }
    g_assert_true(reads_as(b, BLOCK, 2 * BLOCK_SIZE, 0));
    g_assert_true(reads_as(b, BLOCK + 2 * BLOCK_SIZE, BLOCK_SIZE, PATTERN));
    g_assert_cmpuint(inflate_counted(b, "discarded"), ==,
                     discarded + 2 * BLOCK_SIZE);
    g_assert_cmpuint(inflate_counted(b, "zero"), ==, zero);
    g_assert_cmpuint(inflate_skipped(b, "partial-host-page"), ==,
                     2 * BLOCK_SIZE + 3 * PAGE);
    balloon_free(b);
}

/*
 * While the guest is saved or moved
 */

static void set_capability(QTestState *qts, const char *name)
{
    qtest_qmp_assert_success(
        qts, "{ 'execute': 'migrate-set-capabilities', 'arguments': {"
             "  'capabilities': [ { 'capability': %s, 'state': true } ] } }",
        name);
}

/* Whether the host can do it; if not, say so as the reason to skip. */
static bool try_capability(const char *name)
{
    QTestState *qts = qtest_init(ANON);
    QDict *rsp = qtest_qmp(
        qts, "{ 'execute': 'migrate-set-capabilities', 'arguments': {"
             "  'capabilities': [ { 'capability': %s, 'state': true } ] } }",
        name);
    bool ok = !qdict_haskey(rsp, "error");

    if (!ok) {
        g_test_skip(qdict_get_str(qdict_get_qdict(rsp, "error"), "desc"));
    }
    qobject_unref(rsp);
    qtest_quit(qts);
    return ok;
}

static void set_bandwidth(QTestState *qts, const char *which, uint64_t rate)
{
    qtest_qmp_assert_success(
        qts, "{ 'execute': 'migrate-set-parameters',"
             "  'arguments': { %s: %" PRIu64 " } }", which, rate);
}

static void migrate_start(QTestState *qts, const char *uri)
{
    qtest_qmp_assert_success(
        qts, "{ 'execute': 'migrate', 'arguments': { 'uri': %s } }", uri);
}

static char *migrate_status(QTestState *qts)
{
    QDict *info = qtest_qmp_assert_success_ref(
        qts, "{ 'execute': 'query-migrate' }");
    char *status = g_strdup(qdict_haskey(info, "status") ?
                            qdict_get_str(info, "status") : "none");

    qobject_unref(info);
    return status;
}

static uint64_t migrate_remaining(QTestState *qts)
{
    QDict *info = qtest_qmp_assert_success_ref(
        qts, "{ 'execute': 'query-migrate' }");
    uint64_t bytes = UINT64_MAX;

    if (g_str_equal(qdict_get_try_str(info, "status") ?: "", "active")) {
        bytes = qdict_get_int(qdict_get_qdict(info, "ram"), "remaining");
    }
    qobject_unref(info);
    return bytes;
}

static void migrate_wait(QTestState *qts, const char *wanted)
{
    gint64 start = g_get_monotonic_time();

    for (;;) {
        g_autofree char *status = migrate_status(qts);

        if (g_str_equal(status, wanted)) {
            return;
        }
        g_assert_cmpstr(status, !=, "completed");
        if (!g_str_equal(wanted, "failed")) {
            g_assert_cmpstr(status, !=, "failed");
        }
        g_assert(g_get_monotonic_time() - start < TIMEOUT_US);
        g_usleep(10000);
    }
}

/* The balloon of a machine that took over from @from. */
static Balloon *balloon_arrived(Balloon *from, QTestState *qts)
{
    Balloon *b = g_memdup2(from, sizeof(*from));
    QPCIAddress addr = { .devfn = QPCI_DEVFN(4, 0) };

    b->qts = qts;
    b->bus = qpci_new_pc(qts, NULL);
    b->dev = virtio_pci_new(b->bus, &addr);
    g_assert_nonnull(b->dev);
    /* This puts the BAR where it is already: the same for the same machine. */
    qvirtio_pci_device_enable(b->dev);
    b->dev->vdev.features = from->dev->vdev.features;
    b->dev->vdev.features_negotiated = true;
    b->ivq = g_memdup2(from->ivq, sizeof(QVirtQueuePCI));
    b->ivq->vdev = &b->dev->vdev;
    b->dvq = NULL;
    b->vq = g_memdup2(from->vq, sizeof(QVirtQueuePCI));
    b->vq->vdev = &b->dev->vdev;
    return b;
}

static void balloon_arrived_free(Balloon *b)
{
    g_free(b->ivq);
    g_free(b->vq);
    qvirtio_pci_destructor(&b->dev->obj);
    g_free(b->dev);
    qpci_free_pc(b->bus);
    g_free(b);
}

typedef struct Migration {
    char *dir;
    char *uri;
    char *socket;
    Balloon *from;
    QTestState *to;
} Migration;

static void migration_new(Migration *m, const char *from, const char *to,
                          uint64_t refused)
{
    g_autofree char *incoming = NULL;

    m->dir = g_dir_make_tmp("virtio-balloon-XXXXXX", NULL);
    g_assert_nonnull(m->dir);
    m->socket = g_strdup_printf("%s/migration", m->dir);
    m->uri = g_strdup_printf("unix:%s", m->socket);
    incoming = g_strdup_printf("%s -incoming defer", to);
    m->from = balloon_start(from, refused);
    m->to = qtest_init(incoming);
}

static void migration_listen(Migration *m)
{
    qtest_qmp_assert_success(
        m->to, "{ 'execute': 'migrate-incoming', 'arguments': {"
               "  'uri': %s, 'exit-on-error': false } }", m->uri);
}

static void migration_free(Migration *m)
{
    balloon_free(m->from);
    qtest_quit(m->to);
    unlink(m->socket);
    rmdir(m->dir);
    g_free(m->uri);
    g_free(m->socket);
    g_free(m->dir);
}

/*
 * Start a migration in which a block of @b is sent, then report that block
 * while the rest is still being sent.
 */
static void report_what_was_sent(Balloon *b, const char *uri)
{
    g_autofree char *status = NULL;
    gint64 start;

    qtest_memset(b->qts, BLOCK, PATTERN, BLOCK_SIZE);
    /* Enough to send after it to keep the first pass busy. */
    qtest_memset(b->qts, BLOCK + BLOCK_SIZE, PATTERN, 64 * MiB);
    set_bandwidth(b->qts, "max-bandwidth", 4 * MiB);
    migrate_start(b->qts, uri);

    /* RAM goes in order, and first of all this machine's only big block. */
    start = g_get_monotonic_time();
    while (migrate_remaining(b->qts) > RAM_SIZE - BLOCK - 2 * BLOCK_SIZE) {
        g_assert(g_get_monotonic_time() - start < TIMEOUT_US);
        g_usleep(10000);
    }

    g_assert_cmphex(report_one(b, BLOCK, BLOCK_SIZE), ==, BLOCK_SIZE);
    g_assert_true(reads_as(b, BLOCK, BLOCK_SIZE, 0));
    status = migrate_status(b->qts);
    g_assert_cmpstr(status, ==, "active");

    set_bandwidth(b->qts, "max-bandwidth", 0);
    migrate_wait(b->qts, "completed");
}

/* The guest was promised zeros, and the bit has moved along with it. */
static void expect_promise_kept(Balloon *from, QTestState *to)
{
    Balloon *b;

    qtest_qmp_eventwait(to, "RESUME");
    b = balloon_arrived(from, to);
    g_assert_true(reads_as(b, BLOCK, BLOCK_SIZE, 0));
    g_assert_true(reads_as(b, BLOCK + BLOCK_SIZE, BLOCK_SIZE, PATTERN));
    expect_zero(b, BLOCK + BLOCK_SIZE, BLOCK_SIZE);
    expect_skip(b, BLOCK + 1, 4096, "unaligned");
    balloon_arrived_free(b);
}

/*
 * A page is sent, then reported, then the guest moves. Zeros it must find, and
 * not the copy that was sent before.
 */
static void test_precopy(const void *opaque)
{
    const char *capability = opaque;
    Migration m;

    if (capability && !try_capability(capability)) {
        return;
    }

    migration_new(&m, ANON, ANON, 0);
    if (capability) {
        set_capability(m.from->qts, capability);
        set_capability(m.to, capability);
    }
    migration_listen(&m);
    report_what_was_sent(m.from, m.uri);
    expect_promise_kept(m.from, m.to);
    migration_free(&m);
}

/* The same for a guest that is saved to a file in which pages have a place. */
static void test_mapped_ram(void)
{
    g_autofree char *dir = g_dir_make_tmp("virtio-balloon-XXXXXX", NULL);
    g_autofree char *file = g_strdup_printf("%s/guest", dir);
    g_autofree char *uri = g_strdup_printf("file:%s", file);
    Balloon *b = balloon_start(ANON, 0);
    QTestState *to = qtest_init(ANON " -incoming defer");

    set_capability(b->qts, "mapped-ram");
    set_capability(to, "mapped-ram");
    report_what_was_sent(b, uri);
    qtest_qmp_assert_success(
        to, "{ 'execute': 'migrate-incoming', 'arguments': { 'uri': %s } }",
        uri);
    expect_promise_kept(b, to);
    balloon_free(b);
    qtest_quit(to);
    unlink(file);
    rmdir(dir);
}

/* A guest that uses the bit cannot move to where it is not offered. */
static void test_destination_without_bit(void)
{
    Migration m;

    migration_new(&m, ANON, ANON ",x-device-init-reported=off", 0);
    expect_zero(m.from, BLOCK, BLOCK_SIZE);
    migration_listen(&m);
    migrate_start(m.from->qts, m.uri);
    migrate_wait(m.to, "failed");
    migration_free(&m);
}

/* A guest that does not use it can move to where it is, and back. */
static void test_source_without_bit(void)
{
    static const char off[] = ANON ",x-device-init-reported=off";
    const char *from[] = { off, ANON };
    const char *to[] = { ANON, off };
    int i;

    for (i = 0; i < 2; i++) {
        Migration m;
        Balloon *b;

        migration_new(&m, from[i], to[i], BIT_INIT);
        migration_listen(&m);
        migrate_start(m.from->qts, m.uri);
        migrate_wait(m.from->qts, "completed");
        qtest_qmp_eventwait(m.to, "RESUME");

        b = balloon_arrived(m.from, m.to);
        g_assert_cmphex(report_one(b, BLOCK, BLOCK_SIZE), ==, 0);
        balloon_arrived_free(b);
        migration_free(&m);
    }
}

static void test_incoming_postcopy(void)
{
    Migration m;
    Balloon *b;
    gint64 start;

    if (!try_capability("postcopy-ram")) {
        return;
    }

    migration_new(&m, ANON, ANON, 0);
    set_capability(m.from->qts, "postcopy-ram");
    set_capability(m.to, "postcopy-ram");
    qtest_memset(m.from->qts, BLOCK, PATTERN, 64 * MiB);
    set_bandwidth(m.from->qts, "max-bandwidth", 4 * MiB);
    set_bandwidth(m.from->qts, "max-postcopy-bandwidth", 4 * MiB);
    migration_listen(&m);
    migrate_start(m.from->qts, m.uri);
    migrate_wait(m.from->qts, "active");
    qtest_qmp_assert_success(m.from->qts,
                             "{ 'execute': 'migrate-start-postcopy' }");
    qtest_qmp_eventwait(m.to, "RESUME");

    /* The guest runs here while most of its memory is still there. */
    b = balloon_arrived(m.from, m.to);
    expect_skip(b, BLOCK + 60 * MiB, BLOCK_SIZE, "incoming-postcopy");
    {
        g_autofree char *status = migrate_status(m.from->qts);

        g_assert_cmpstr(status, ==, "postcopy-active");
    }

    set_bandwidth(m.from->qts, "max-postcopy-bandwidth", 0);
    migrate_wait(m.from->qts, "completed");
    migrate_wait(m.to, "completed");
    /* The state that inhibits ends a moment after the one that we see. */
    start = g_get_monotonic_time();
    while (!report_one(b, BLOCK + 62 * MiB, BLOCK_SIZE)) {
        g_assert(g_get_monotonic_time() - start < TIMEOUT_US);
        g_usleep(10000);
    }
    expect_zero(b, BLOCK + 60 * MiB, BLOCK_SIZE);
    balloon_arrived_free(b);
    migration_free(&m);
}

static void test_background_snapshot(void)
{
    g_autofree char *dir = g_dir_make_tmp("virtio-balloon-XXXXXX", NULL);
    g_autofree char *file = g_strdup_printf("%s/snapshot", dir);
    g_autofree char *uri = g_strdup_printf("file:%s", file);
    Balloon *b;

    if (!try_capability("background-snapshot")) {
        rmdir(dir);
        return;
    }

    b = balloon_start(ANON, 0);
    set_capability(b->qts, "background-snapshot");
    qtest_memset(b->qts, BLOCK, PATTERN, 64 * MiB);
    set_bandwidth(b->qts, "max-bandwidth", 4 * MiB);
    migrate_start(b->qts, uri);
    migrate_wait(b->qts, "active");

    /* What the guest held when the snapshot began must get into it. */
    expect_skip(b, BLOCK + 60 * MiB, BLOCK_SIZE, "background-snapshot");
    {
        g_autofree char *status = migrate_status(b->qts);

        g_assert_cmpstr(status, ==, "active");
    }

    set_bandwidth(b->qts, "max-bandwidth", 0);
    migrate_wait(b->qts, "completed");
    expect_zero(b, BLOCK + 60 * MiB, BLOCK_SIZE);
    balloon_free(b);
    unlink(file);
    rmdir(dir);
}

/*
 * Pages of the balloon while the guest is saved or moved
 */

/* Ballooned after it was sent: zeros must arrive, as they were promised. */
static void test_inflate_precopy(const void *opaque)
{
    const char *capability = opaque;
    gint64 start;
    Migration m;
    Balloon *b;

    if (capability && !try_capability(capability)) {
        return;
    }
    migration_new(&m, INFLATE, INFLATE, 0);
    if (capability) {
        set_capability(m.from->qts, capability);
        set_capability(m.to, capability);
    }
    migration_listen(&m);
    qtest_memset(m.from->qts, BLOCK, PATTERN, 66 * MiB);
    set_bandwidth(m.from->qts, "max-bandwidth", 4 * MiB);
    migrate_start(m.from->qts, m.uri);
    start = g_get_monotonic_time();
    while (migrate_remaining(m.from->qts) > RAM_SIZE - BLOCK - 2 * BLOCK_SIZE) {
        g_assert(g_get_monotonic_time() - start < TIMEOUT_US);
        g_usleep(10000);
    }
    /* Its pages have been sent. expect_inflated() writes them, so do not. */
    {
        g_autofree uint32_t *pfns = g_new(uint32_t, 256);
        uint8_t bitmap[32];
        unsigned int i;

        for (i = 0; i < 256; i++) {
            pfns[i] = PFN + i;
        }
        g_assert_cmpuint(inflate(m.from, pfns, 256, bitmap, 32), ==, 32);
        for (i = 0; i < 32; i++) {
            g_assert_cmphex(bitmap[i], ==, 0xff);
        }
    }
    {
        g_autofree char *status = migrate_status(m.from->qts);

        g_assert_cmpstr(status, ==, "active");
    }
    set_bandwidth(m.from->qts, "max-bandwidth", 0);
    migrate_wait(m.from->qts, "completed");
    qtest_qmp_eventwait(m.to, "RESUME");

    b = balloon_arrived(m.from, m.to);
    g_assert_true(reads_as(b, BLOCK, 256 * PAGE, 0));
    g_assert_true(page_reads_as(b, PFN + 256, PATTERN));
    /* The bit has moved along. */
    expect_inflated(b, PFN + 1024, 9);
    balloon_arrived_free(b);
    migration_free(&m);
}

static void test_inflate_destination_without_bit(void)
{
    Migration m;

    migration_new(&m, INFLATE, ANON, 0);
    expect_inflated(m.from, PFN, 9);
    migration_listen(&m);
    migrate_start(m.from->qts, m.uri);
    migrate_wait(m.to, "failed");
    migration_free(&m);
}

static void test_inflate_incoming_postcopy(void)
{
    uint32_t late = PFN + 60 * MiB / PAGE;
    Migration m;
    Balloon *b;

    if (!try_capability("postcopy-ram")) {
        return;
    }
    migration_new(&m, INFLATE, INFLATE, 0);
    set_capability(m.from->qts, "postcopy-ram");
    set_capability(m.to, "postcopy-ram");
    qtest_memset(m.from->qts, BLOCK, PATTERN, 64 * MiB);
    set_bandwidth(m.from->qts, "max-bandwidth", 4 * MiB);
    set_bandwidth(m.from->qts, "max-postcopy-bandwidth", 4 * MiB);
    migration_listen(&m);
    migrate_start(m.from->qts, m.uri);
    migrate_wait(m.from->qts, "active");
    qtest_qmp_assert_success(m.from->qts,
                             "{ 'execute': 'migrate-start-postcopy' }");
    qtest_qmp_eventwait(m.to, "RESUME");

    b = balloon_arrived(m.from, m.to);
    expect_no_claim(b, late, 9, PATTERN);
    g_assert_cmpuint(inflate_skipped(b, "incoming-postcopy"), ==, 9 * PAGE);
    set_bandwidth(m.from->qts, "max-postcopy-bandwidth", 0);
    migrate_wait(m.from->qts, "completed");
    balloon_arrived_free(b);
    migration_free(&m);
}

static void test_inflate_background_snapshot(void)
{
    g_autofree char *dir = g_dir_make_tmp("virtio-balloon-XXXXXX", NULL);
    g_autofree char *file = g_strdup_printf("%s/snapshot", dir);
    g_autofree char *uri = g_strdup_printf("file:%s", file);
    Balloon *b;

    if (!try_capability("background-snapshot")) {
        rmdir(dir);
        return;
    }
    b = balloon_start(INFLATE, 0);
    set_capability(b->qts, "background-snapshot");
    qtest_memset(b->qts, BLOCK, PATTERN, 64 * MiB);
    set_bandwidth(b->qts, "max-bandwidth", 4 * MiB);
    migrate_start(b->qts, uri);
    migrate_wait(b->qts, "active");
    expect_no_claim(b, PFN + 60 * MiB / PAGE, 9, PATTERN);
    g_assert_cmpuint(inflate_skipped(b, "background-snapshot"), ==, 9 * PAGE);
    set_bandwidth(b->qts, "max-bandwidth", 0);
    migrate_wait(b->qts, "completed");
    expect_inflated(b, PFN, 9);
    balloon_free(b);
    unlink(file);
    rmdir(dir);
}

static void add_to(const char *group, const char *name, void (*fn)(void))
{
    g_autofree char *path = g_strdup_printf("virtio-balloon/%s/%s", group,
                                            name);

    qtest_add_func(path, fn);
}

static void add(const char *name, void (*fn)(void))
{
    add_to("reporting", name, fn);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);

    add("offered", test_offered);
    add("refused-properties", test_refused_properties);
    add("zero", test_zero);
    add("legacy-driver", test_legacy_driver);
    add("not-negotiated", test_not_negotiated);
    add("renegotiated", test_renegotiated);
    add("elements", test_elements);
    add("buffers-of-one-element", test_buffers_of_one_element);
    add("used-length-overflow", test_used_length_overflow);
    add("unaligned", test_unaligned);
    add("over-long", test_over_long);
    add("queue", test_queue);
    add("not-ram", test_not_ram);
    add("readable-buffers", test_readable_buffers);
    add("poison", test_poison);
    add("anonymous", test_anonymous);
    add("memfd", test_memfd);
    add("file", test_file);
    add("discard-fails", test_discard_fails);
    add("hugetlb", test_hugetlb);
    add("two-backends", test_two_backends);
    qtest_add_data_func("virtio-balloon/reporting/precopy", NULL, test_precopy);
    qtest_add_data_func("virtio-balloon/reporting/precopy-xbzrle", "xbzrle",
                        test_precopy);
    qtest_add_data_func("virtio-balloon/reporting/precopy-multifd", "multifd",
                        test_precopy);
    qtest_add_data_func("virtio-balloon/reporting/precopy-postcopy-capable",
                        "postcopy-ram", test_precopy);
    add("mapped-ram", test_mapped_ram);
    add("destination-without-bit", test_destination_without_bit);
    add("source-without-bit", test_source_without_bit);
    add("incoming-postcopy", test_incoming_postcopy);
    add("background-snapshot", test_background_snapshot);

    add_to("inflate", "offered", test_inflate_offered);
    add_to("inflate", "zero", test_inflate_zero);
    add_to("inflate", "bit-order", test_inflate_bit_order);
    add_to("inflate", "what-is-written", test_inflate_what_is_written);
    add_to("inflate", "not-negotiated", test_inflate_not_negotiated);
    add_to("inflate", "no-room", test_inflate_no_room);
    add_to("inflate", "scattered", test_inflate_scattered);
    add_to("inflate", "deflate", test_deflate);
    add_to("inflate", "poison", test_inflate_poison);
    add_to("inflate", "backends", test_inflate_backends);
    add_to("inflate", "discard-fails", test_inflate_discard_fails);
    add_to("inflate", "two-backends", test_inflate_two_backends);
    add_to("inflate", "hugetlb", test_inflate_hugetlb);
    qtest_add_data_func("virtio-balloon/inflate/precopy", NULL,
                        test_inflate_precopy);
    qtest_add_data_func("virtio-balloon/inflate/precopy-multifd", "multifd",
                        test_inflate_precopy);
    add_to("inflate", "destination-without-bit",
           test_inflate_destination_without_bit);
    add_to("inflate", "incoming-postcopy", test_inflate_incoming_postcopy);
    add_to("inflate", "background-snapshot", test_inflate_background_snapshot);

    return g_test_run();
}
