/* SPDX-License-Identifier: GPL-2.0 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM page_zeroed

#if !defined(_TRACE_PAGE_ZEROED_H) || defined(TRACE_HEADER_MULTI_READ)
#define _TRACE_PAGE_ZEROED_H

#include <linux/mm.h>
#include <linux/tracepoint.h>

#define show_page_zeroed_sources(mask)					\
	__print_flags(mask, "|",					\
		{ BIT(0), "reported" },					\
		{ BIT(1), "freed" },					\
		{ BIT(2), "inflated" },					\
		{ BIT(3), "prezeroed" })

#define show_page_zeroed_loss(reason)					\
	__print_symbolic(reason,					\
		{ 0, "merge" },						\
		{ 1, "report" },					\
		{ 2, "resume" },					\
		{ 3, "distrust" },					\
		{ 4, "removed" })

DECLARE_EVENT_CLASS(page_zeroed_block,

	TP_PROTO(struct page *page, unsigned int order, unsigned int sources),

	TP_ARGS(page, order, sources),

	TP_STRUCT__entry(
		__field(unsigned long,	pfn)
		__field(unsigned int,	order)
		__field(unsigned int,	sources)
	),

	TP_fast_assign(
		__entry->pfn		= page_to_pfn(page);
		__entry->order		= order;
		__entry->sources	= sources;
	),

	TP_printk("pfn=0x%lx order=%u sources=%s",
		  __entry->pfn, __entry->order,
		  show_page_zeroed_sources(__entry->sources))
);

/* A free block became known zero. */
DEFINE_EVENT(page_zeroed_block, page_zeroed_set,
	TP_PROTO(struct page *page, unsigned int order, unsigned int sources),
	TP_ARGS(page, order, sources)
);

/* A known-zero block was allocated and did not have to be zeroed. */
DEFINE_EVENT(page_zeroed_block, page_zeroed_skip,
	TP_PROTO(struct page *page, unsigned int order, unsigned int sources),
	TP_ARGS(page, order, sources)
);

/* A known-zero block was allocated by somebody who did not ask for zeros. */
DEFINE_EVENT(page_zeroed_block, page_zeroed_unwanted,
	TP_PROTO(struct page *page, unsigned int order, unsigned int sources),
	TP_ARGS(page, order, sources)
);

/* A known-zero block turned out to hold something else. */
DEFINE_EVENT(page_zeroed_block, page_zeroed_bad,
	TP_PROTO(struct page *page, unsigned int order, unsigned int sources),
	TP_ARGS(page, order, sources)
);

/* A free block is no longer known to be zero. */
TRACE_EVENT(page_zeroed_lost,

	TP_PROTO(struct page *page, unsigned int order, unsigned int reason),

	TP_ARGS(page, order, reason),

	TP_STRUCT__entry(
		__field(unsigned long,	pfn)
		__field(unsigned int,	order)
		__field(unsigned int,	reason)
	),

	TP_fast_assign(
		__entry->pfn		= page_to_pfn(page);
		__entry->order		= order;
		__entry->reason		= reason;
	),

	TP_printk("pfn=0x%lx order=%u reason=%s",
		  __entry->pfn, __entry->order,
		  show_page_zeroed_loss(__entry->reason))
);

#endif /* _TRACE_PAGE_ZEROED_H */

/* This part must be outside protection */
#include <trace/define_trace.h>
