/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The model of refpage_fuzz: the expected content of each page of its area, and its entry in the
 * kernel's list of mappings.
 */
#ifndef KZ_GUEST_REFPAGE_MODEL_H
#define KZ_GUEST_REFPAGE_MODEL_H

#include "common.h"

#include <sys/ioctl.h>

#define PAGE 4096UL
/* Far from the addresses that the kernel chooses, and aligned for any huge page. */
#define ARENA 0x100000000000UL
#define NR_WRITES 4
#define EACH(i, n) (i = 0; i < (n); i++)

enum style { ZEROS, BYTES, WORDS, NOISE, NR_STYLES };

/* Repeats the first 1 << log2 bytes that style and seed generate. */
struct content {
	uint32_t seed;
	uint8_t style;
	uint8_t log2;
};

struct write {
	uint16_t offset, length;
	uint32_t seed;
};

/* The content of OTHER may change without a call from here, and is not checked. */
enum kind { NONE, REF, ANON, OTHER };

enum { NO, YES, MAYBE };

struct page {
	uint8_t kind;
	uint8_t prot;
	uint8_t dontfork, wipe;	/* NO, YES, MAYBE */
	bool unknown;		/* its content is unknown until it is written */
	uint8_t nr_writes;
	struct content content;	/* before the writes */
	struct write writes[NR_WRITES];
};

/* A range of the area, in pages. */
struct range {
	unsigned long first, number;
};

static void *address(unsigned long index)
{
	return (void *)(ARENA + index * PAGE);
}

static void content_fill(unsigned char *mem, struct content content)
{
	const unsigned long size = 1UL << content.log2;
	uint64_t word = kz_mix(content.seed);
	unsigned long i;

	for (i = 0; i < PAGE; i += 8) {
		if (content.style == NOISE && i < size)
			word = kz_mix((uint64_t)content.seed << 20 | i);
		else if (content.style == BYTES)
			word = (word & 255) * 0x0101010101010101ULL;
		else if (content.style == ZEROS)
			word = 0;
		*(uint64_t *)(void *)(mem + i) = word;
	}
	for (i = size; i < PAGE; i *= 2)
		memcpy(mem + i, mem, i);
}

/* The content of a write depends on its place in the page too. */
static void write_fill(unsigned char *mem, struct write write)
{
	const unsigned long end = (unsigned long)write.offset + write.length;
	uint64_t word = 0;
	unsigned long i;

	for (i = write.offset; i < end; i++) {
		if (i == write.offset || i % 8 == 0)
			word = kz_mix((uint64_t)write.seed << 20 | (i / 8));
		mem[i] = (unsigned char)(word >> (i % 8 * 8));
	}
}

static void model_fill(unsigned char *mem, const struct page *page)
{
	int i;

	content_fill(mem, page->content);
	for EACH(i, page->nr_writes)
		write_fill(mem, page->writes[i]);
}

static void pristine(struct page *page)
{
	page->nr_writes = 0;
	page->unknown = false;
}

static void model_write(struct page *page, struct write write)
{
	if (write.length == PAGE)
		pristine(page);
	page->writes[page->nr_writes++] = write;
}

static bool alike(const struct page *a, const struct page *b)
{
	return a->kind == b->kind && a->prot == b->prot && a->dontfork == b->dontfork &&
	       a->wipe == b->wipe && !memcmp(&a->content, &b->content, 6);
}

/* The kernel's list of mappings */

struct procmap_query_ {
	uint64_t size, query_flags, query_addr;
	uint64_t vma_start, vma_end, vma_flags, vma_page_size, vma_offset, inode;
	uint32_t dev_major, dev_minor, vma_name_size, build_id_size;
	uint64_t vma_name_addr, build_id_addr;
};

#define PROCMAP_QUERY_ _IOWR('f', 17, struct procmap_query_)
#define COVERING_OR_NEXT 0x10

/* Calls @fn for each page of the range with its kind and protection in the kernel. */
static void scan(struct range r, void (*fn)(unsigned long index, enum kind kind, unsigned int prot))
{
	static char name[4096];
	unsigned long i = r.first, end = r.first + r.number;
	int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		kz_fail("cannot open /proc/self/maps");
	while (i < end) {
		struct procmap_query_ query = {
			.size = sizeof(query), .query_flags = COVERING_OR_NEXT,
			.query_addr = (uint64_t)address(i), .vma_name_size = sizeof(name),
			.vma_name_addr = (uint64_t)name,
		};
		int ret = ioctl(fd, PROCMAP_QUERY_, &query);
		enum kind kind = OTHER;

		if (ret && errno != ENOENT)
			kz_fail("PROCMAP_QUERY of /proc/self/maps");
		if (ret)
			query.vma_start = query.vma_end = ~0UL;
		for (; i < end && (uint64_t)address(i) < query.vma_start; i++)
			fn(i, NONE, 0);
		if (!query.inode && !query.vma_name_size)
			kind = ANON;
		else if (query.vma_name_size && !strncmp(name, "anon_inode:[refpage]", 20))
			kind = REF;
		for (; i < end && (uint64_t)address(i) < query.vma_end; i++)
			fn(i, kind, query.vma_flags & 7);
	}
	close(fd);
}

#endif
