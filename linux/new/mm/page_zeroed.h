/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Known-zero pages: the state of a free block, and the rules for changing it.
 *
 * A free block of 2^order pages whose bytes are all zero carries PG_zeroed on
 * its head page, and on that page only. Who vouches for it is kept in the head
 * page's index, as a mask of BIT(enum page_zeroed_source). Both are meaningful
 * only while the block is free: on a buddy list, on a per-CPU list, or isolated
 * by somebody who will put it back. post_alloc_hook() takes them off.
 *
 * PG_zeroed shares its bit with PG_private, whose users expect to find it clear
 * in the pages they get: no block may leave the allocator with it.
 */
#ifndef __MM_PAGE_ZEROED_H
#define __MM_PAGE_ZEROED_H

#include <linux/bits.h>
#include <linux/highmem.h>
#include <linux/jump_label.h>
#include <linux/kasan.h>
#include <linux/mmdebug.h>
#include <linux/mm_types.h>
#include <linux/mmzone.h>
#include <linux/page-flags.h>
#include <linux/page_zeroed.h>
#include <linux/vm_event_item.h>
#include <linux/vmstat.h>

/*
 * In the order of the PGZEROED_SET_* and PGZEROED_SKIP_* events. A block that
 * was merged from several sources counts for the first of them.
 */
enum page_zeroed_source {
	PAGE_ZEROED_REPORTED,	/* the host said so when it was reported */
	PAGE_ZEROED_FREED,	/* it was zero when it was freed */
	PAGE_ZEROED_INFLATED,	/* the host said so when it was ballooned */
	PAGE_ZEROED_PREZEROED,	/* kzeropaged zeroed it */
	NR_PAGE_ZEROED_SOURCES
};

enum page_zeroed_loss {
	PAGE_ZEROED_LOST_MERGE,		/* the other half was not known zero */
	PAGE_ZEROED_LOST_REPORT,	/* reported, and the host gave no answer */
	PAGE_ZEROED_LOST_RESUME,	/* free memory is junk after hibernation */
	PAGE_ZEROED_LOST_DISTRUST,	/* a source was caught lying */
	PAGE_ZEROED_LOST_REMOVED,	/* taken out: offlined, poisoned, contiguous */
};

/*
 * Kept in the index beside the sources. The bit that says "zero" is one that
 * others use too, so do not go by that bit alone.
 */
#define PAGE_ZEROED_COOKIE	0x2e5a4f00UL
#define PAGE_ZEROED_SOURCES	(BIT(NR_PAGE_ZEROED_SOURCES) - 1)

#ifdef CONFIG_PAGE_ZEROED

DECLARE_STATIC_KEY_FALSE(page_zeroed_active);
DECLARE_STATIC_KEY_MAYBE(CONFIG_PAGE_ZEROED_DEBUG, page_zeroed_verify_enabled);

int page_zeroed_enable(void);
bool page_zeroed_trusted(enum page_zeroed_source source);
void page_zeroed_claim(struct page *page, unsigned int order,
		       enum page_zeroed_source source);
bool page_zeroed_consume(struct page *page, unsigned int order,
			 unsigned int sources, bool wanted);
void page_zeroed_lose(struct page *page, unsigned int order,
		      enum page_zeroed_loss reason);
void page_zeroed_account(struct page *page, long nr);
void page_zeroed_count_lost(unsigned long nr);
void __page_zeroed_verify(struct page *page, unsigned int order,
			  unsigned int sources);

#if IS_ENABLED(CONFIG_KUNIT)
/* To catch a liar without a report, and to pardon him afterwards. */
extern unsigned long page_zeroed_distrusted;
extern unsigned int page_zeroed_verify_interval;
void page_zeroed_report(struct page *page, unsigned int order,
			unsigned int sources, struct page *bad,
			unsigned int offset);
#endif

/*
 * May any block carry PG_zeroed? Turned on, everywhere, before the first is
 * marked, and never off again.
 */
static __always_inline bool page_zeroed_tracked(void)
{
	return static_branch_unlikely(&page_zeroed_active);
}

/*
 * Who says that the free block headed by @page is zero? 0 if nobody does.
 * The caller owns the block, or holds zone->lock while it is on a free list.
 */
static __always_inline unsigned int page_zeroed_sources(const struct page *page)
{
	unsigned long word;

	if (!page_zeroed_tracked() || !PageZeroed(page))
		return 0;

	word = page->__folio_index;
	if (unlikely((word & ~PAGE_ZEROED_SOURCES) != PAGE_ZEROED_COOKIE)) {
		VM_WARN_ON_ONCE(1);
		return 0;
	}

	return word & PAGE_ZEROED_SOURCES;
}

/*
 * Is the free block headed by @page known zero, and has nobody told the host that
 * it may take its memory back? The caller holds zone->lock or has it isolated.
 */
static __always_inline bool page_zeroed_resident(const struct page *page)
{
	const unsigned int absent = BIT(PAGE_ZEROED_REPORTED) |
				    BIT(PAGE_ZEROED_INFLATED);
	unsigned int sources = page_zeroed_sources(page);

	return sources && !(sources & absent);
}

/*
 * Zero a page of a free block that the caller has isolated. Where clear_page() is
 * a memset() that KASAN looks at, KASAN would report a use after free, and leave
 * the page as it is.
 */
static inline void page_zeroed_clear_free(struct page *page)
{
	kasan_disable_current();
	clear_highpage_kasan_tagged(page);
	kasan_enable_current();
}

/*
 * Call the block headed by @page known zero. The caller holds zone->lock or has
 * the block isolated. Atomic, since memory_failure() may set its flag meanwhile.
 */
static __always_inline void page_zeroed_mark(struct page *page,
					     unsigned int sources)
{
	if (!sources)
		return;

	page->__folio_index = PAGE_ZEROED_COOKIE | sources;
	SetPageZeroed(page);
}

/* Take what is known of the block headed by @page off it, and return it. */
static __always_inline unsigned int page_zeroed_take(struct page *page)
{
	unsigned int sources;

	if (!page_zeroed_tracked() || !PageZeroed(page))
		return 0;

	sources = page_zeroed_sources(page);
	ClearPageZeroed(page);
	page->__folio_index = 0;

	return sources;
}

/*
 * @page and @buddy, of 2^@order pages each, become one block headed by @merged:
 * it is known zero only if both were.
 */
static __always_inline void page_zeroed_merge(struct page *page,
					      struct page *buddy,
					      struct page *merged,
					      unsigned int order)
{
	unsigned int a, b;

	if (!page_zeroed_tracked())
		return;

	a = page_zeroed_take(page);
	b = page_zeroed_take(buddy);
	if (a && b)
		page_zeroed_mark(merged, a | b);
	else if (a || b)
		page_zeroed_lose(a ? page : buddy, order, PAGE_ZEROED_LOST_MERGE);
}

/* @part is split off the block headed by @page, which keeps what it had. */
static __always_inline void page_zeroed_split(const struct page *page,
					      struct page *part)
{
	if (page_zeroed_tracked())
		page_zeroed_mark(part, page_zeroed_sources(page));
}

/* Forget what is known of a block that leaves the allocator unallocated. */
static inline void page_zeroed_drop(struct page *page, unsigned int order,
				    enum page_zeroed_loss reason)
{
	if (page_zeroed_take(page))
		page_zeroed_lose(page, order, reason);
}

/*
 * Zeroing was skipped on the word of @sources: see whether it is true. Reads
 * the memory, so the block must be mapped and unpoisoned. @sources may be 0.
 */
static __always_inline void page_zeroed_verify(struct page *page,
					       unsigned int order,
					       unsigned int sources)
{
	if (sources && static_branch_maybe(CONFIG_PAGE_ZEROED_DEBUG,
					   &page_zeroed_verify_enabled))
		__page_zeroed_verify(page, order, sources);
}

/*
 * Memory that @sources vouch for, or nobody if it is 0, is put to use. Returns
 * the sources on whose word it need not be zeroed, or 0: then it must be, if its
 * user wants zeros (@wanted). Counts that as done.
 */
static __always_inline unsigned int page_zeroed_settle(struct page *page,
						       unsigned int order,
						       unsigned int sources,
						       bool wanted)
{
	if (!page_zeroed_tracked())
		return 0;

	if (sources && page_zeroed_consume(page, order, sources, wanted))
		return sources;

	if (wanted)
		count_vm_events(PGZEROED_CLEARED, 1 << order);
	return 0;
}

/*
 * A block leaves the allocator, and is no longer marked afterwards. Returns who
 * vouches for its being zero, or 0.
 */
static __always_inline unsigned int page_zeroed_detach(struct page *page,
						       unsigned int order)
{
	unsigned int sources = page_zeroed_take(page);

	if (sources)
		page_zeroed_account(page, -(1L << order));
	return sources;
}

/*
 * A block leaves the allocator. Returns the sources on whose word it need not
 * be zeroed, or 0: then nothing is known, or its caller does not want zeros
 * (@wanted). Whichever it is, the block is no longer marked afterwards.
 */
static __always_inline unsigned int page_zeroed_leave(struct page *page,
						      unsigned int order,
						      bool wanted)
{
	return page_zeroed_settle(page, order, page_zeroed_detach(page, order),
				  wanted);
}

#else /* !CONFIG_PAGE_ZEROED */

static inline int page_zeroed_enable(void)
{
	return -EOPNOTSUPP;
}

static inline void page_zeroed_claim(struct page *page, unsigned int order,
				     enum page_zeroed_source source)
{
}

static inline bool page_zeroed_tracked(void)
{
	return false;
}

static inline unsigned int page_zeroed_sources(const struct page *page)
{
	return 0;
}

static inline bool page_zeroed_resident(const struct page *page)
{
	return false;
}

static inline void page_zeroed_mark(struct page *page, unsigned int sources)
{
}

static inline unsigned int page_zeroed_take(struct page *page)
{
	return 0;
}

static inline void page_zeroed_merge(struct page *page, struct page *buddy,
				     struct page *merged, unsigned int order)
{
}

static inline void page_zeroed_split(const struct page *page, struct page *part)
{
}

static inline void page_zeroed_drop(struct page *page, unsigned int order,
				    enum page_zeroed_loss reason)
{
}

static inline void page_zeroed_lose(struct page *page, unsigned int order,
				    enum page_zeroed_loss reason)
{
}

static inline void page_zeroed_verify(struct page *page, unsigned int order,
				      unsigned int sources)
{
}

static inline void page_zeroed_account(struct page *page, long nr)
{
}

static inline void page_zeroed_count_lost(unsigned long nr)
{
}

static inline unsigned int page_zeroed_settle(struct page *page,
					      unsigned int order,
					      unsigned int sources, bool wanted)
{
	return 0;
}

static inline unsigned int page_zeroed_detach(struct page *page,
					      unsigned int order)
{
	return 0;
}

static inline unsigned int page_zeroed_leave(struct page *page,
					     unsigned int order, bool wanted)
{
	return 0;
}

#endif /* CONFIG_PAGE_ZEROED */

#endif /* __MM_PAGE_ZEROED_H */
