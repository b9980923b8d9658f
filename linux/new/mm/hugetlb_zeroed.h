/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Known-zero hugetlb folios.
 *
 * A folio keeps HPG_zeroed from when it is allocated for the pool until it is
 * handed out or goes back to the page allocator, if all of it is zero. Who
 * vouches for that is kept beside the flag in folio->private, as a mask of
 * BIT(enum page_zeroed_source): if one of them turns out to lie, nothing that he
 * has vouched for is believed, here as in the page allocator.
 *
 * Whoever marks a folio or takes its mark off holds hugetlb_lock, or is the only
 * one who knows of the folio.
 */
#ifndef __MM_HUGETLB_ZEROED_H
#define __MM_HUGETLB_ZEROED_H

#include <linux/bitops.h>
#include <linux/build_bug.h>
#include <linux/hugetlb.h>
#include "page_zeroed.h"

#if defined(CONFIG_PAGE_ZEROED) && defined(CONFIG_HUGETLB_PAGE)

#define HUGETLB_ZEROED_SHIFT	16
#define HUGETLB_ZEROED_MASK	((PAGE_ZEROED_SOURCES << HUGETLB_ZEROED_SHIFT) | \
				 BIT(HPG_zeroed))

static_assert(__NR_HPAGEFLAGS <= HUGETLB_ZEROED_SHIFT);
static_assert(NR_PAGE_ZEROED_SOURCES <= 32 - HUGETLB_ZEROED_SHIFT);

/* Who says that @folio is zero? 0 if nobody does. */
static inline unsigned int hugetlb_zeroed_sources(const struct folio *folio)
{
	const unsigned long word = (unsigned long)READ_ONCE(folio->private);

	if (!(word & BIT(HPG_zeroed)))
		return 0;

	return (word >> HUGETLB_ZEROED_SHIFT) & PAGE_ZEROED_SOURCES;
}

/* Other flags may change at the same time, so this has to be atomic. */
static inline void hugetlb_zeroed_mark(struct folio *folio, unsigned int sources)
{
	unsigned long *word = (unsigned long *)&folio->private;

	if (sources)
		set_mask_bits(word, HUGETLB_ZEROED_MASK, BIT(HPG_zeroed) |
			      ((unsigned long)sources << HUGETLB_ZEROED_SHIFT));
}

/* Take what is known of @folio off it, and return it. */
static inline unsigned int hugetlb_zeroed_take(struct folio *folio)
{
	unsigned int sources = hugetlb_zeroed_sources(folio);

	if (folio_test_hugetlb_zeroed(folio))
		set_mask_bits((unsigned long *)&folio->private,
			      HUGETLB_ZEROED_MASK, 0);

	return sources;
}

/* Pages of a free folio that are zeroed in one go, with a lock held. */
#define HUGETLB_ZEROING_STEP	4

void hugetlb_zeroing_cancel(struct folio *folio);
long hugetlb_zero_free(struct hstate *h, int nid, bool (*stop)(void *data),
		       void *data);

#else

static inline unsigned int hugetlb_zeroed_sources(const struct folio *folio)
{
	return 0;
}

static inline void hugetlb_zeroed_mark(struct folio *folio, unsigned int sources)
{
}

static inline unsigned int hugetlb_zeroed_take(struct folio *folio)
{
	return 0;
}

static inline void hugetlb_zeroing_cancel(struct folio *folio)
{
}

#endif /* CONFIG_PAGE_ZEROED && CONFIG_HUGETLB_PAGE */

#endif /* __MM_HUGETLB_ZEROED_H */
