/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A memory balloon on virtio-pci, driven by a program: huge pages as memory of known physical address, and split rings
 * in the first of them. The kernel's driver must be unbound.
 */
#ifndef KZ_GUEST_BALLOON_PCI_H
#define KZ_GUEST_BALLOON_PCI_H

#include "common.h"

#include <sched.h>

#include <linux/virtio_balloon.h>
#include <linux/virtio_config.h>
#include <linux/virtio_pci.h>
#include <linux/virtio_ring.h>

#define BIT(n) (1ULL << (n))
#define NEEDS_STATS BIT(VIRTIO_BALLOON_F_STATS_VQ)
#define NEEDS_HINTING BIT(VIRTIO_BALLOON_F_FREE_PAGE_HINT)
#define NEEDS_REPORTING BIT(VIRTIO_BALLOON_F_REPORTING)
#define INIT_REPORTED 6			/* VIRTIO_BALLOON_F_DEVICE_INIT_REPORTED */
#define INIT_ON_INFLATE 7		/* VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE */
#define REPORT_NOW 16			/* VIRTIO_BALLOON_F_REPORT_NOW */
#define PATIENCE 3000			/* ms in which a device has to answer */
#define MAX_RING 1024
#define POOL "/proc/sys/vm/nr_hugepages"

enum queue { INFLATE, DEFLATE, STATS, HINTING, REPORTING, QUEUES };

static void wait_ms(unsigned int ms)
{
	usleep(ms * 1000);
}

static unsigned char *pool;
static uint64_t *frames;		/* physical address of each huge page */
static size_t pages;

static uint64_t address_of(const void *at)
{
	size_t offset = (size_t)((const unsigned char *)at - pool);

	return frames[offset / KZ_HUGE] + offset % KZ_HUGE;
}

/* A huge page other than the first. */
static unsigned char *block(size_t n)
{
	return pool + (1 + n % (pages - 1)) * KZ_HUGE;
}

static void *small(size_t offset)
{
	return pool + KZ_HUGE / 2 + offset;
}

/* Takes half of the free memory. */
static bool take_pool(void)
{
	KZ_FD map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	char text[32];
	size_t i;

	kz_write_file("/proc/sys/vm/compact_memory", "1");
	snprintf(text, sizeof(text), "%lu", kz_meminfo("MemFree") / 2 / KZ_HUGE);
	kz_write_file(POOL, text);
	pages = kz_meminfo("HugePages_Free") / 1024;
	if (map < 0 || pages < 8)
		return false;
	pool = kz_map(pages * KZ_HUGE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_POPULATE);
	frames = calloc(pages, sizeof(*frames));
	for (i = 0; i < pages; i++) {
		uint64_t entry = 0;

		if (pread(map, &entry, sizeof(entry), (off_t)((uintptr_t)(pool + i * KZ_HUGE) / 4096 * 8)) != 8 || !(entry << 9))
			return false;
		frames[i] = (entry & (BIT(55) - 1)) * 4096;
	}
	return true;
}

struct ring {
	volatile struct vring_desc *desc;
	volatile struct vring_avail *avail;
	volatile struct vring_used *used;
	volatile uint16_t *bell;	/* NULL: a port of the legacy interface */
	int ports;
	uint16_t index, size, next, given, taken;
	volatile struct vring_packed_desc *packed;	/* NULL: a split ring */
};

struct device {
	char name[32], pci[PATH_MAX];
	volatile struct virtio_pci_common_cfg *common;
	volatile uint32_t *config;
	volatile unsigned char *notify;
	uint32_t config_size, bell_size;
	uint64_t offered, features;
	uint16_t id;			/* of the PCI device; 0: not on virtio-pci */
	int ports;			/* the legacy interface; -1: none */
	bool packed;			/* start() makes packed rings */
	struct ring rings[QUEUES];
};

struct part {
	const void *at;
	size_t size;
	bool writable;
};

static unsigned char *map_bar(const struct device *d, int bar, size_t offset, size_t size)
{
	char path[PATH_MAX + 16];
	size_t skip = offset % 4096;
	void *at;

	snprintf(path, sizeof(path), "%s/resource%d", d->pci, bar);
	KZ_FD fd = open(path, O_RDWR | O_CLOEXEC);
	at = mmap(NULL, skip + size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(offset - skip));
	return at == MAP_FAILED ? NULL : (unsigned char *)at + skip;
}

/* Finds the structures of a device; false if it is not on virtio-pci with a modern interface. */
static bool find(struct device *d)
{
	unsigned char space[256] = { 0 };
	char path[PATH_MAX + 16];
	unsigned int at, left = 48;
	uint16_t command;

	snprintf(path, sizeof(path), "%s/config", d->pci);
	KZ_FD fd = open(path, O_RDWR | O_CLOEXEC);
	d->ports = -1;
	if (fd < 0 || pread(fd, space, sizeof(space), 0) < 64)
		return false;
	/* Ports, memory, bus master, and no interrupt: it has no handler. */
	memcpy(&command, space + 4, 2);
	command |= 0x407;
	if (pwrite(fd, &command, 2, 4) != 2)
		return false;
	memcpy(&d->id, space + 2, 2);
	snprintf(path, sizeof(path), "%s/resource0", d->pci);
	if (d->id == 0x1002 && space[0x10] & 1)
		d->ports = open(path, O_RDWR | O_CLOEXEC);
	for (at = space[0x34]; at && left--; at = space[at + 1]) {
		const struct virtio_pci_cap *cap = (const void *)(space + at);
		unsigned char *mapped;

		if (cap->cap_vndr != 9 || cap->bar > 5)
			continue;
		mapped = map_bar(d, cap->bar, cap->offset, cap->length);
		if (cap->cfg_type == VIRTIO_PCI_CAP_COMMON_CFG)
			d->common = (void *)mapped;
		if (cap->cfg_type == VIRTIO_PCI_CAP_DEVICE_CFG) {
			d->config = (void *)mapped;
			d->config_size = cap->length;
		}
		if (cap->cfg_type == VIRTIO_PCI_CAP_NOTIFY_CFG) {
			d->notify = mapped;
			memcpy(&d->bell_size, space + at + sizeof(*cap), 4);
		}
	}
	if (!d->common || !d->config || !d->notify)
		return false;
	d->common->device_feature_select = 1;
	d->offered = (uint64_t)d->common->device_feature << 32;
	d->common->device_feature_select = 0;
	d->offered |= d->common->device_feature;
	return d->offered & BIT(VIRTIO_F_VERSION_1);
}

static bool reset(struct device *d)
{
	int ms;

	d->common->device_status = 0;
	for (ms = 0; ms < PATIENCE && d->common->device_status; ms++)
		wait_ms(1);
	return ms < PATIENCE;
}

static const uint64_t needs[QUEUES] = { 0, 0, NEEDS_STATS, NEEDS_HINTING, NEEDS_REPORTING };

/* Queue @q in its memory, where the legacy interface expects the parts; @size: 0 to leave it out. */
static struct ring lay_out(const struct device *d, int q, uint16_t index, uint16_t size)
{
	unsigned char *at = pool + (size_t)q * 65536;

	return (struct ring){ (void *)at, (void *)(at + size * 16), (void *)(at + ((size * 18 + 6 + 4095) & ~4095)),
			      .ports = d->ports, .index = index, .size = size };
}

static uint32_t in(const struct device *d, int port, size_t size)
{
	uint32_t value = 0;

	return pread(d->ports, &value, size, port) == (ssize_t)size ? value : 0;
}

static bool out(const struct device *d, int port, size_t size, uint32_t value)
{
	return pwrite(d->ports, &value, size, port) == (ssize_t)size;
}

/* As start(), through the legacy interface and with bits 0 to 5. */
static const char *start_legacy(struct device *d)
{
	uint16_t index = 0;
	int q;

	if (!out(d, VIRTIO_PCI_STATUS, 1, 0) || in(d, VIRTIO_PCI_STATUS, 1))
		return "the device does not leave its reset";
	out(d, VIRTIO_PCI_STATUS, 1, VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER);
	d->features = d->offered & 0x3f;
	out(d, VIRTIO_PCI_GUEST_FEATURES, 4, (uint32_t)d->features);
	memset(pool, 0, KZ_HUGE / 2);
	memset(d->rings, 0, sizeof(d->rings));
	for (q = 0; q < QUEUES; q++) {
		if (needs[q] && !(d->features & needs[q]))
			continue;
		out(d, VIRTIO_PCI_QUEUE_SEL, 2, index);
		d->rings[q] = lay_out(d, q, index++, (uint16_t)in(d, VIRTIO_PCI_QUEUE_NUM, 2));
		if (!d->rings[q].size || d->rings[q].size > MAX_RING)
			return "a queue is missing, or is too large";
		out(d, VIRTIO_PCI_QUEUE_PFN, 4, (uint32_t)(address_of((const void *)d->rings[q].desc) >> 12));
		d->rings[q].avail->flags = VRING_AVAIL_F_NO_INTERRUPT;
	}
	out(d, VIRTIO_PCI_STATUS, 1, VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER | VIRTIO_CONFIG_S_DRIVER_OK);
	return NULL;
}

/* Negotiates features (those that are offered) and starts the queues, numbered as Linux does. Returns NULL, or the defect. */
static const char *start(struct device *d, uint64_t wanted, unsigned int largest)
{
	volatile struct virtio_pci_common_cfg *c = d->common;
	uint16_t index = 0, size;
	int q;

	if (!reset(d))
		return "the device does not leave its reset";
	c->device_status = VIRTIO_CONFIG_S_ACKNOWLEDGE;
	c->device_status |= VIRTIO_CONFIG_S_DRIVER;
	d->features = wanted & d->offered & 0xff;
	/* Bit 6 needs bit 5. */
	if (!(d->features & NEEDS_REPORTING))
		d->features &= ~BIT(INIT_REPORTED);
	d->features |= BIT(VIRTIO_F_VERSION_1) | (d->packed ? BIT(VIRTIO_F_RING_PACKED) : 0);
	c->guest_feature_select = 0;
	c->guest_feature = (uint32_t)d->features;
	c->guest_feature_select = 1;
	c->guest_feature = d->features >> 32;
	c->device_status |= VIRTIO_CONFIG_S_FEATURES_OK;
	if (!(c->device_status & VIRTIO_CONFIG_S_FEATURES_OK))
		return "the device refuses these features";
	memset(pool, 0, KZ_HUGE / 2);
	memset(d->rings, 0, sizeof(d->rings));
	for (q = 0; q < QUEUES; q++) {
		struct ring *r = &d->rings[q];
		uint64_t where[3];

		if (needs[q] && !(d->features & needs[q]))
			continue;
		c->queue_select = index;
		size = c->queue_size;
		if (!size || (size & (size - 1)))
			return "a queue is missing, or its size is no power of two";
		if (size > largest)
			c->queue_size = size = (uint16_t)largest;
		*r = lay_out(d, q, index++, size);
		if (d->packed)
			r->packed = (void *)r->desc;
		where[0] = address_of((const void *)r->desc);
		where[1] = address_of((const void *)r->avail);
		where[2] = address_of((const void *)r->used);
		c->queue_desc_lo = (uint32_t)where[0];
		c->queue_desc_hi = where[0] >> 32;
		c->queue_avail_lo = (uint32_t)where[1];
		c->queue_avail_hi = where[1] >> 32;
		c->queue_used_lo = (uint32_t)where[2];
		c->queue_used_hi = where[2] >> 32;
		r->bell = (void *)(d->notify + (size_t)c->queue_notify_off * d->bell_size);
		if (d->packed)
			((volatile struct vring_packed_desc_event *)r->avail)->flags = VRING_PACKED_EVENT_FLAG_DISABLE;
		else
			r->avail->flags = VRING_AVAIL_F_NO_INTERRUPT;
		c->queue_enable = 1;
	}
	c->device_status |= VIRTIO_CONFIG_S_DRIVER_OK;
	return NULL;
}

/* The flags that a packed descriptor has from its driver (@driver), or from the device when it is used. */
static uint16_t owner(const struct ring *r, uint16_t n, bool driver)
{
	bool first = !(n / r->size % 2), used = first != driver;

	return (uint16_t)((first << VRING_PACKED_DESC_F_AVAIL) | (used << VRING_PACKED_DESC_F_USED));
}

/* Here a packed ring has one buffer at a time. */
static void give_packed(struct ring *r, const struct part *parts, int count)
{
	uint16_t flags = 0;
	int i;

	r->given = r->next;
	r->next = (uint16_t)(r->next + count);
	for (i = count - 1; i >= 0; i--) {
		uint16_t n = (uint16_t)(r->given + i);
		volatile struct vring_packed_desc *desc = &r->packed[n % r->size];

		desc->addr = address_of(parts[i].at);
		desc->len = (uint32_t)parts[i].size;
		desc->id = r->given % r->size;
		flags = (i + 1 < count ? VRING_DESC_F_NEXT : 0) | (parts[i].writable ? VRING_DESC_F_WRITE : 0) | owner(r, n, true);
		if (i)
			desc->flags = flags;
	}
	__sync_synchronize();
	r->packed[r->given % r->size].flags = flags;
	__sync_synchronize();
}

/* Makes a buffer available; its parts are readable first. */
static void give(struct ring *r, const struct part *parts, int count)
{
	uint16_t head = r->next % r->size;
	int i;

	if (r->packed) {
		give_packed(r, parts, count);
		return;
	}
	for (i = 0; i < count; i++) {
		volatile struct vring_desc *desc = &r->desc[r->next++ % r->size];

		desc->addr = address_of(parts[i].at);
		desc->len = (uint32_t)parts[i].size;
		desc->flags = (i + 1 < count ? VRING_DESC_F_NEXT : 0) | (parts[i].writable ? VRING_DESC_F_WRITE : 0);
		desc->next = r->next % r->size;
	}
	r->avail->ring[r->given++ % r->size] = head;
	__sync_synchronize();
	r->avail->idx = r->given;
	__sync_synchronize();
}

static bool is_used(const struct ring *r)
{
	const uint16_t both = BIT(VRING_PACKED_DESC_F_AVAIL) | BIT(VRING_PACKED_DESC_F_USED);

	if (!r->packed)
		return r->used->idx != r->taken;
	return (r->packed[r->given % r->size].flags & both) == owner(r, r->given, false);
}

static void kick(const struct ring *r)
{
	if (r->bell)
		*r->bell = r->index;
	else if (pwrite(r->ports, &r->index, 2, VIRTIO_PCI_QUEUE_NOTIFY) != 2)
		kz_fail("cannot write to a port");
}

/* The next used length, or -1 if there is none in time. */
static int64_t take(struct ring *r, int ms)
{
	int64_t length;
	int polls = 0;

	/* Most answers come before a sleep would end. */
	for (kick(r); !is_used(r); polls++) {
		if (polls < 200) {
			sched_yield();
			continue;
		}
		if (ms-- <= 0)
			return -1;
		wait_ms(1);
	}
	__sync_synchronize();
	if (r->packed)
		return r->packed[r->given % r->size].len;
	length = r->used->ring[r->taken++ % r->size].len;
	return length;
}

static int64_t ask(struct device *d, enum queue q, const struct part *parts, int count)
{
	give(&d->rings[q], parts, count);
	return take(&d->rings[q], PATIENCE);
}

#endif
