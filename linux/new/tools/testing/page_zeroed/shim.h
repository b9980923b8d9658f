/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the extracted functions expect of the kernel around them: as little as
 * they can do with. One zone, one CPU, and memory that is an array in main.c.
 */
#ifndef _SHIM_H
#define _SHIM_H

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_PAGE_ZEROED		1
#define CONFIG_PAGE_REPORTING		1
#define CONFIG_COMPACTION		1

/* Small, so that all that can happen at the edges does happen. */
#define MAX_PAGE_ORDER			6
#define NR_PAGE_ORDERS			(MAX_PAGE_ORDER + 1)
#define pageblock_order			4U
#define pageblock_nr_pages		(1UL << pageblock_order)
#define pageblock_start_pfn(pfn)	((pfn) & ~(pageblock_nr_pages - 1))
#define pageblock_end_pfn(pfn)		(pageblock_start_pfn(pfn) + pageblock_nr_pages)
#define NR_PAGES			(6UL << MAX_PAGE_ORDER)

/* The compiler and the usual macros */
#undef __always_inline
#define __always_inline			inline __attribute__((always_inline))
#define __force
#define __bitwise
#define __rcu
#define likely(x)			(x)
#define unlikely(x)			(x)
#define READ_ONCE(x)			(x)
#define WRITE_ONCE(x, v)		((x) = (v))
/* One CPU: nothing to pair with. */
#define smp_load_acquire(p)		(*(p))
#define BIT(n)				(1UL << (n))
#define IS_ENABLED(x)			0
#define IS_ALIGNED(x, a)		(!((x) & ((typeof(x))(a) - 1)))
#define __ffs(x)			((unsigned int)__builtin_ctzl(x))
#define container_of(ptr, type, member) \
	((type *)((char *)(ptr) - offsetof(type, member)))

/* main.c: says what is wrong, and how it came about */
void __attribute__((noreturn, format(printf, 1, 2))) broken(const char *fmt, ...);

#define broken_if(cond) ({						\
	bool __cond = !!(cond);						\
									\
	if (__cond)							\
		broken("%s:%d: %s", __FILE__, __LINE__, #cond);		\
	__cond;								\
})
#define VM_BUG_ON(cond)			((void)broken_if(cond))
#define VM_BUG_ON_PAGE(cond, page)	((void)broken_if(cond))
#define VM_WARN_ON(cond)		broken_if(cond)
#define VM_WARN_ON_ONCE(cond)		broken_if(cond)
#define VM_WARN_ON_ONCE_PAGE(cond, page) broken_if(cond)
#define VM_WARN_ON_PAGE(cond, page)	broken_if(cond)
#define VM_WARN_ONCE(cond, ...)		broken_if(cond)

/* Locks: there is nobody else */
typedef struct { int unused; } spinlock_t;
#define guard(lock)			(void)
#define spin_lock_irqsave(lock, flags)	((void)(lock), (flags) = 0)
#define spin_trylock_irqsave(lock, flags) ((void)(lock), (flags) = 0, true)
#define spin_unlock_irqrestore(lock, flags) ((void)(lock), (void)(flags))
#define lockdep_assert_held(lock)	((void)(lock))

/* What is in the pages main.c keeps account of: nothing extracted writes to them. */
#define kasan_disable_current()		((void)0)
#define kasan_enable_current()		((void)0)
#define clear_highpage_kasan_tagged(page) broken_if((page) != NULL)
extern bool trylock_fails;
#define can_spin_trylock()		(!trylock_fails)

/* Static keys are variables */
struct static_key_false { bool on; };
#define DEFINE_STATIC_KEY_FALSE(name)	struct static_key_false name
#define DECLARE_STATIC_KEY_FALSE(name)	extern struct static_key_false name
#define DECLARE_STATIC_KEY_MAYBE(config, name) DECLARE_STATIC_KEY_FALSE(name)
#define static_branch_unlikely(key)	((key)->on)
#define static_branch_maybe(config, key) ((key)->on)

/* Lists */
struct list_head { struct list_head *next, *prev; };

static inline void INIT_LIST_HEAD(struct list_head *list)
{
	list->next = list->prev = list;
}

static inline bool list_empty(const struct list_head *list)
{
	return list->next == list;
}

static inline void list_add(struct list_head *entry, struct list_head *head)
{
	entry->next = head->next;
	entry->prev = head;
	head->next->prev = entry;
	head->next = entry;
}

static inline void list_add_tail(struct list_head *entry, struct list_head *head)
{
	list_add(entry, head->prev);
}

static inline void list_del(struct list_head *entry)
{
	entry->next->prev = entry->prev;
	entry->prev->next = entry->next;
	entry->next = entry->prev = NULL;
}

static inline void list_move_tail(struct list_head *entry, struct list_head *head)
{
	list_del(entry);
	list_add_tail(entry, head);
}

#define list_entry(ptr, type, member)	container_of(ptr, type, member)
#define list_last_entry(head, type, member) \
	list_entry((head)->prev, type, member)
#define list_first_entry_or_null(head, type, member) \
	(list_empty(head) ? NULL : list_entry((head)->next, type, member))
#define list_for_each_entry(pos, head, member)				\
	for (pos = list_entry((head)->next, typeof(*pos), member);	\
	     &pos->member != (head);					\
	     pos = list_entry(pos->member.next, typeof(*pos), member))
#define list_for_each_entry_safe(pos, n, head, member)			\
	for (pos = list_entry((head)->next, typeof(*pos), member),	\
	     n = list_entry(pos->member.next, typeof(*pos), member);	\
	     &pos->member != (head);					\
	     pos = n, n = list_entry(n->member.next, typeof(*n), member))

struct llist_node { struct llist_node *next; };
struct llist_head { struct llist_node *first; };

static inline void llist_add(struct llist_node *node, struct llist_head *head)
{
	node->next = head->first;
	head->first = node;
}

static inline struct llist_node *llist_del_all(struct llist_head *head)
{
	struct llist_node *first = head->first;

	head->first = NULL;
	return first;
}

#define llist_empty(head)		(!(head)->first)
#define llist_entry(ptr, type, member)	((ptr) ? container_of(ptr, type, member) : NULL)
#define llist_for_each_entry_safe(pos, n, node, member)			\
	for (pos = llist_entry(node, typeof(*pos), member);		\
	     pos && (n = llist_entry(pos->member.next, typeof(*pos), member), true); \
	     pos = n)

/* Zones and pages */
enum migratetype {
	MIGRATE_UNMOVABLE,
	MIGRATE_MOVABLE,
	MIGRATE_RECLAIMABLE,
	MIGRATE_PCPTYPES,
	MIGRATE_HIGHATOMIC = MIGRATE_PCPTYPES,
	MIGRATE_CMA,
	MIGRATE_ISOLATE,
	MIGRATE_TYPES
};
#define is_migrate_cma(mt)		((mt) == MIGRATE_CMA)
#define is_migrate_isolate(mt)		((mt) == MIGRATE_ISOLATE)
#define migratetype_is_mergeable(mt)	((mt) < MIGRATE_PCPTYPES)
#define PAGEBLOCK_MIGRATETYPE_MASK	0

struct free_area {
	struct list_head free_list[MIGRATE_TYPES];
	unsigned long nr_free;
};

enum zone_watermarks { WMARK_MIN, NR_WMARK };
enum { NR_FREE_PAGES, NR_FREE_PAGES_BLOCKS, NR_FREE_CMA_PAGES, NR_FREE_ZEROED, NR_STATS };
enum { ZONE_BOOSTED_WATERMARK };

struct zone {
	spinlock_t lock;
	struct free_area free_area[NR_PAGE_ORDERS];
	struct llist_head trylock_free_pages;
	unsigned long _watermark[NR_WMARK];
	unsigned long nr_free_highatomic;
	unsigned long flags;
	long stat[NR_STATS];
};

struct page {
	struct { unsigned long f; } flags;
	union {
		struct list_head lru;
		struct list_head buddy_list;
		struct list_head pcp_list;
		struct llist_node pcp_llist;
	};
	unsigned long __folio_index;
	unsigned long private;
	int _refcount;
	bool buddy, guard;
};

extern struct page mem_map[NR_PAGES];
extern struct zone the_zone;
extern int block_type[NR_PAGES >> pageblock_order];
extern bool block_isolated[NR_PAGES >> pageblock_order];

#define for_each_populated_zone(zone)	\
	for ((zone) = &the_zone; (zone); (zone) = NULL)
#define pfn_to_page(pfn)		(&mem_map[pfn])
#define page_to_pfn(page)		((unsigned long)((page) - mem_map))
#define page_zone(page)			((void)(page), &the_zone)
#define page_zone_id(page)		((void)(page), 0)
#define page_to_nid(page)		((void)(page), 0)
#define zone_to_nid(zone)		((void)(zone), 0)
#define zone_is_initialized(zone)	((void)(zone), true)
#define zone_spans_pfn(zone, pfn)	((pfn) < NR_PAGES)
#define zone_watermark_ok(...)		true
#define bad_range(zone, page)		((page) < mem_map || (page) >= mem_map + NR_PAGES)
#define __mod_zone_page_state(zone, item, n) ((void)((zone)->stat[item] += (n)))
#define mod_zone_page_state		__mod_zone_page_state

#define PAGE_FLAG(name, bit)						\
static inline bool Page##name(const struct page *page)			\
{									\
	return page->flags.f & BIT(bit);				\
}									\
static inline void SetPage##name(struct page *page)			\
{									\
	page->flags.f |= BIT(bit);					\
}									\
static inline void ClearPage##name(struct page *page)			\
{									\
	page->flags.f &= ~BIT(bit);					\
}									\
static inline bool TestClearPage##name(struct page *page)		\
{									\
	bool was = Page##name(page);					\
									\
	ClearPage##name(page);						\
	return was;							\
}
PAGE_FLAG(Zeroed, 0)
PAGE_FLAG(Reported, 1)
PAGE_FLAG(HWPoison, 2)
PAGE_FLAG(HWPoisonTakenOff, 3)
#define __SetPageReported		SetPageReported
#define __ClearPageReported		ClearPageReported
#define __PG_ZEROED			BIT(0)
/* PageReported is PG_uptodate in the kernel, which is not checked either. */
#define PAGE_FLAGS_CHECK_AT_PREP	BIT(0)

#define PageBuddy(page)			((page)->buddy)
#define __SetPageBuddy(page)		((page)->buddy = true)
#define __ClearPageBuddy(page)		((page)->buddy = false)
#define page_is_guard(page)		((page)->guard)
#define PageLRU(page)			false
#define page_has_movable_ops(page)	false
#define page_private(page)		((page)->private)
#define set_page_private(page, v)	((page)->private = (v))
#define page_count(page)		((page)->_refcount)
#define put_page_testzero(page)		(--(page)->_refcount == 0)

extern unsigned int guard_minorder;

static inline bool set_page_guard(struct zone *zone, struct page *page,
				  unsigned int order)
{
	if (order >= guard_minorder)
		return false;

	page->guard = true;
	INIT_LIST_HEAD(&page->buddy_list);
	set_page_private(page, order);
	return true;
}

static inline void clear_page_guard(struct zone *zone, struct page *page,
				    unsigned int order)
{
	page->guard = false;
	set_page_private(page, 0);
}

/* Pageblocks */
#define __get_pfnblock_flags_mask(page, pfn, mask) block_type[(pfn) >> pageblock_order]
#define get_pageblock_isolate(page)	block_isolated[page_to_pfn(page) >> pageblock_order]
#define set_pageblock_isolate(page)	(get_pageblock_isolate(page) = true)
#define clear_pageblock_isolate(page)	(get_pageblock_isolate(page) = false)

static inline int get_pfnblock_migratetype(const struct page *page,
					   unsigned long pfn)
{
	const unsigned long block = pfn >> pageblock_order;

	return block_isolated[block] ? MIGRATE_ISOLATE : block_type[block];
}

static inline int get_pageblock_migratetype(const struct page *page)
{
	return get_pfnblock_migratetype(page, page_to_pfn(page));
}

static inline void set_pageblock_migratetype(struct page *page, int mt)
{
	block_type[page_to_pfn(page) >> pageblock_order] = mt;
}

/* Compaction's capture */
#define PF_KTHREAD			1
struct capture_control {
	struct zone *zone;
	int migratetype;
	unsigned int order;
	struct page *page;
};
struct task_struct {
	struct capture_control *capture_control;
	unsigned int flags;
};
extern struct task_struct *current;

/* Reporting */
extern struct static_key_false page_reporting_enabled;
#define page_reporting_notify_free(order) ((void)(order))
#define prezero_notify_free(page, order) ((void)(order))
#define PAGE_REPORTING_CAPACITY		32
#define PAGE_SHIFT			12
struct scatterlist {
	struct page *page;
	unsigned int length;
	bool last;
};
struct page_reporting_dev_info {
	bool tells_zeroed;
	unsigned long zeroed[1];
};
#define BITS_PER_LONG			(8 * (int)sizeof(long))
#define test_bit(n, map) \
	(((map)[(n) / BITS_PER_LONG] >> ((n) % BITS_PER_LONG)) & 1)

static inline void bitmap_zero(unsigned long *map, unsigned int nr)
{
	memset(map, 0, (nr + BITS_PER_LONG - 1) / BITS_PER_LONG * sizeof(*map));
}

static inline void bitmap_set(unsigned long *map, unsigned int start, unsigned int nr)
{
	for (; nr; nr--, start++)
		map[start / BITS_PER_LONG] |= 1UL << (start % BITS_PER_LONG);
}

static inline unsigned int bitmap_weight(const unsigned long *map, unsigned int nr)
{
	unsigned int i, weight = 0;

	for (i = 0; i < nr; i++)
		weight += test_bit(i, map);
	return weight;
}
#define sg_page(sg)			((sg)->page)
#define sg_next(sg)			((sg)->last ? NULL : (sg) + 1)
#define sg_init_table(sgl, nents)	((void)(nents))
#define get_order(size)			((unsigned int)__builtin_ctzl((size) >> PAGE_SHIFT))

/* Counters and tracepoints */
enum vm_event_item {
	PGFREE,
	PGZEROED_SET_REPORTED, PGZEROED_SET_FREED, PGZEROED_SET_INFLATED, PGZEROED_SET_PREZEROED,
	PGZEROED_SKIP_REPORTED, PGZEROED_SKIP_FREED,
	PGZEROED_SKIP_INFLATED, PGZEROED_SKIP_PREZEROED,
	PGZEROED_UNWANTED, PGZEROED_LOST, PGZEROED_CLEARED, PGZEROED_BAD,
	NR_VM_EVENT_ITEMS
};
extern unsigned long vm_events[NR_VM_EVENT_ITEMS];
#define count_vm_events(item, n)	((void)(vm_events[item] += (n)))
#define __count_vm_events		count_vm_events
#define trace_page_zeroed_set(...)	((void)0)
#define trace_page_zeroed_skip(...)	((void)0)
#define trace_page_zeroed_unwanted(...)	((void)0)
#define trace_page_zeroed_lost(...)	((void)0)
#define trace_mm_page_alloc_extfrag(...) ((void)0)
#define trace_mm_page_alloc_zone_locked(...) ((void)0)

/* What allocation and the rest of the free path come down to here */
typedef unsigned int gfp_t;
typedef unsigned int fpi_t;
#define __GFP_MOVABLE			0
#define ALLOC_DEFAULT			0
#define ALLOC_CMA			0
#define ALLOC_KSWAPD			1
#define ALLOC_ZEROED			2
#define pcp_allowed_order(order)	((order) <= 3)
#define page_group_by_mobility_disabled	false
#define boost_watermark(zone)		false
#define set_bit(nr, addr)		((void)(addr))
#define is_shuffle_order(order)		false
#define shuffle_pick_tail()		false

bool __free_pages_prepare(struct page *page, unsigned int order, fpi_t fpi_flags);
void mark_allocated(struct page *page, unsigned int order, gfp_t gfp);
void __free_pages(struct page *page, unsigned int order);
void free_frozen_pages_zeroed(struct page *page, unsigned int order);

#endif
