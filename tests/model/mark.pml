/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The rules of the known-zero mark, for the model checker SPIN. README.md has
 * what is modelled and what is not. "Kernel:" names the functions that the
 * lines below it stand for; test_mark.py compares these names with the series.
 *
 * Memory is PAGES pages in blocks of order 0 to MAX_ORDER. What runs with
 * zone->lock held is one step (d_step), so the lock itself is no variable. A
 * choice that the kernel makes by the order of a list is free here.
 *
 * Content is one bit a page: dirty[] is 0 if all bytes are zero. The user of a
 * page always writes to it; before it frees a page as zero, it zeroes it.
 *
 * Options:
 *	REPORT		the page reporter, the device, resume from hibernation
 *	PREZERO		kzeropaged
 *	BALLOON		a balloon with VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE
 *	HUGETLB		a pool of huge pages
 *	FAILURE		memory_failure(), unpoison_memory()
 *	COMPACT		compaction, alloc_contig_frozen_range()
 *	ACCEPT		memory that has to be accepted, in a confidential guest
 *	OFFLINE		isolation of pageblocks, and memory that goes offline
 *	DISTRUST	a source turns out to be wrong
 *	QUEUE		free_frozen_pages_nolock() while zone->lock is taken
 *	CPUS=n, PAGEBLOCK_ORDER=n, BAD=n (the only page that fails)
 *	MUTANT_name	the mistake of tests/mutants/name.patch, and RULE_ ones
 */
#define PAGES		4
#define MAX_ORDER	2
#define NONE		PAGES		/* no page */

#ifndef CPUS
#define CPUS		2
#endif
#ifndef PAGEBLOCK_ORDER
#define PAGEBLOCK_ORDER	2
#endif

/* Where a block is: at its first page. The other pages are TAIL. */
#define TAIL		0
#define FREE		1	/* PageBuddy */
#define CACHED		2	/* on a per-CPU list; which CPU's, makes no difference */
#define QUEUED		3	/* on zone->trylock_free_pages */
#define BUSY		4	/* between a user and the allocator */
#define REPORTED	5	/* isolated by the page reporter */
#define HELD		6	/* isolated by kzeropaged */
#define ISOLATED	7	/* isolated by compaction */
#define USED		8	/* allocated: each page for itself */
#define TAKEN_OFF	9	/* PageHWPoisonTakenOff, or a bad page that was freed */
#define GONE		10	/* offline */
#define BALLOONED	11
#define POOLED		12	/* in the pool of hugetlb */
#define HUGE		13	/* taken out of that pool */
#define UNACCEPTED	14	/* on zone->unaccepted_pages */

#ifdef ACCEPT
#define AT_FIRST	UNACCEPTED
#else
#define AT_FIRST	FREE
#endif

/* At first all memory is one dirty block. */
byte kind[PAGES] = { AT_FIRST, TAIL, TAIL, TAIL };
byte ord[PAGES] = { MAX_ORDER, 0, 0, 0 };	/* of the block, at its first page */
bit dirty[PAGES] = { 1, 1, 1, 1 };
bit zeroed[PAGES];		/* PG_zeroed */
bit reported[PAGES];		/* PageReported */
bit trusted = 1;		/* !page_zeroed_distrusted */
#ifdef PREZERO
bit prezeroed[PAGES];		/* PG_prezeroed */
#define is_prezeroed(p)		prezeroed[p]
#define set_prezeroed(p, v)	prezeroed[p] = v
#else
#define is_prezeroed(p)		0
#define set_prezeroed(p, v)	skip
#endif
#ifdef FAILURE
bit hwpoison[PAGES];
#define is_bad(p)	hwpoison[p]
#else
#define is_bad(p)	0
#endif
#ifdef OFFLINE
bit isolated[PAGES];	/* by pageblock */
#define mergeable(p, b, o) \
	(o < PAGEBLOCK_ORDER || isolated[p >> PAGEBLOCK_ORDER] == isolated[b >> PAGEBLOCK_ORDER])
#define in_isolation(p)	isolated[(p) >> PAGEBLOCK_ORDER]
#else
#define mergeable(p, b, o) 1
#define in_isolation(p)	0
#endif

#ifdef RULE_merge_needs_one
#define MERGED		||
#else
#define MERGED		&&
#endif
#ifdef RULE_merge_needs_one_prezeroed
#define MERGED_PREZEROED ||
#else
#define MERGED_PREZEROED &&
#endif

/* Scratch variables of steps: 0 after each. */
byte fp, fo, fb, lower, upper, ci, cj, ep, eo, lp, lo, le, hp, ho;
bit z1, z2, z3, erep, split_zeroed, split_prezeroed;

inline end_step()
{
	fp = 0; fo = 0; fb = 0; lower = 0; upper = 0; ci = 0; cj = 0;
	ep = 0; eo = 0; lp = 0; lo = 0; le = 0; hp = 0; ho = 0;
	z1 = 0; z2 = 0; z3 = 0; erep = 0; split_zeroed = 0; split_prezeroed = 0
}

/* The head of a block that is neither used nor in another block */
#define is_block(p)	(kind[p] >= FREE && kind[p] <= ISOLATED)
#define is_aligned(p, o) (((p) & ((1 << (o)) - 1)) == 0)

#define PICK(v, ok) \
	if \
	:: ok(0) -> v = 0 \
	:: ok(1) -> v = 1 \
	:: ok(2) -> v = 2 \
	:: ok(3) -> v = 3 \
	:: else -> v = NONE \
	fi

#define CHOOSE(v)	if :: v = 0 :: v = 1 fi

/*
 * What must hold after each step: only the first page of a block carries a mark,
 * and only while the block is free; a block with the mark is clean. The mark of
 * kzeropaged comes with the mark. Marks say nothing once a source was wrong, and
 * while the device has the block: then they are set or cleared by its answer.
 */
#define counts(p)	(trusted && kind[p] != REPORTED)

inline check()
{
	for (ci : 0 .. PAGES - 1) {
		if
		:: is_block(ci) ->
			assert(is_aligned(ci, ord[ci]));
			assert(!reported[ci] || kind[ci] == FREE);
			for (cj : ci .. ci + (1 << ord[ci]) - 1) {
				assert(!zeroed[ci] || !counts(ci) || !dirty[cj]);
				assert(cj == ci || (kind[cj] == TAIL && !zeroed[cj] && !reported[cj] &&
						    !is_prezeroed(cj)))
			};
			assert(zeroed[ci] || !is_prezeroed(ci))
		:: kind[ci] > ISOLATED -> assert(!zeroed[ci] && !reported[ci] && !is_prezeroed(ci))
		:: else
		fi
	}
	end_step()
}

/* The mark, in mm/page_zeroed.h */

/*
 * The zeros are used, lost, or the host's from now on. Kernel: mm/prezero.h
 * prezero_end()
 */
#ifdef MUTANT_prezero_keeps_mark
#define prezero_end(p)		skip
#else
#define prezero_end(p)		set_prezeroed(p, 0)
#endif

/* Kernel: mm/page_zeroed.h page_zeroed_test() page_zeroed_test_clear() page_zeroed_clear() */
inline page_zeroed_test_clear(p, was)
{
	was = zeroed[p];
	zeroed[p] = 0;
#ifndef RULE_clear_keeps_prezeroed
	set_prezeroed(p, is_prezeroed(p) && !was)
#endif
}

/* Kernel: mm/page_zeroed.c page_zeroed_set() page_zeroed_trusted() */
inline page_zeroed_set(p)
{
	zeroed[p] = zeroed[p] || trusted
}

/* Kernel: mm/page_zeroed.h page_zeroed_take() */
inline page_zeroed_take(p, z, pre)
{
	pre = is_prezeroed(p);
	page_zeroed_test_clear(p, z);
	z = z || pre
}

/* Kernel: mm/page_zeroed.h page_zeroed_give() */
inline page_zeroed_give(p, z, pre)
{
	if
	:: z ->
		zeroed[p] = 1;
		set_prezeroed(p, is_prezeroed(p) || (pre))
	:: else
	fi
}

/* Kernel: mm/page_zeroed.h page_zeroed_merge() */
inline page_zeroed_merge(p, b, o)
{
	lower = (p < b -> p : b);
	upper = (p < b -> b : p);
	if
#ifdef PREZERO
	:: prezeroed[lower] MERGED_PREZEROED prezeroed[upper] ->
		page_zeroed_take(upper, z1, z2)
#endif
	:: else ->
		prezero_end(lower);
		prezero_end(upper);
		page_zeroed_test_clear(lower, z1);
		page_zeroed_test_clear(upper, z2);
		zeroed[lower] = (z1 MERGED z2)
	fi
}

/* Kernel: mm/page_zeroed.h page_zeroed_split() */
inline page_zeroed_split(p, part)
{
#ifdef RULE_split_always_zero
	zeroed[part] = 1
#else
	page_zeroed_give(part, zeroed[p] || is_prezeroed(p), is_prezeroed(p))
#endif
}

/* The buddy allocator, in mm/page_alloc.c */

/* Kernel: mm/page_alloc.c __del_page_from_free_list() del_page_from_free_list() */
inline del_page_from_free_list(p, k)
{
	assert(kind[p] == FREE);
	kind[p] = k;
	reported[p] = 0
}

/* Kernel: mm/page_alloc.c __add_to_free_list() add_to_free_list() set_buddy_order() */
inline add_to_free_list(p, o)
{
	kind[p] = FREE;
	ord[p] = o
}

/* Kernel: mm/page_alloc.h page_is_buddy() find_buddy_page_pfn() __find_buddy_pfn() */
#define find_buddy(p, o, b) \
	b = (p) ^ (1 << (o)); \
	b = (kind[b] == FREE && ord[b] == (o) && mergeable(p, b, o) -> b : NONE)

inline merge_with(p, b, o)
{
	del_page_from_free_list(b, TAIL);
	page_zeroed_merge(p, b, o);
	kind[p] = TAIL;
	ord[p] = 0;
	ord[b] = 0;
	p = p & b;
	o++
}

/* Kernel: mm/page_alloc.c __free_one_page() */
inline __free_one_page(page, order)
{
	fp = page;
	fo = order;
	do
	:: fo < MAX_ORDER ->
		find_buddy(fp, fo, fb);
		if
		:: fb == NONE -> break
		:: else
		fi;
		merge_with(fp, fb, fo)
	:: else -> break
	od;
	add_to_free_list(fp, fo)
}

/* Kernel: mm/page_alloc.c split_large_buddy() */
inline split_large_buddy(page, order)
{
	lp = page;
	lo = order;
	le = lp + (1 << lo);
	page_zeroed_take(lp, split_zeroed, split_prezeroed);
	lo = (lo > PAGEBLOCK_ORDER -> PAGEBLOCK_ORDER : lo);
	kind[lp] = TAIL;
	ord[lp] = 0;
	do
	:: lp < le ->
		page_zeroed_give(lp, split_zeroed, split_prezeroed);
		__free_one_page(lp, lo);
		lp = lp + (1 << lo)
	:: else -> break
	od
}

/* Kernel: mm/page_alloc.c __putback_isolated_page() */
#define __putback_isolated_page(p, o)	split_large_buddy(p, o)

/*
 * Kernel: mm/page_alloc.c isolate_free_page_keep_type() __isolate_free_page()
 */
#define isolate_free_page(p, k)		del_page_from_free_list(p, k)

/*
 * Kernel: mm/page_alloc.c page_del_and_expand() expand() mm/page_reporting.h
 * page_reporting_inherit() page_reported()
 */
inline page_del_and_expand(p, low, k)
{
	erep = reported[p];
	eo = ord[p];
	del_page_from_free_list(p, k);
	do
	:: eo > low ->
		eo--;
		ep = p + (1 << eo);
		add_to_free_list(ep, eo);
		reported[ep] = erep;
		page_zeroed_split(p, ep)
	:: else -> break
	od;
	ord[p] = low
}

/* Each page of an allocation stands for itself: it may be split and freed in parts. */
inline hand_out(p, o)
{
	ep = p;
	eo = p + (1 << o);
	do
	:: ep < eo ->
		kind[ep] = USED;
		ord[ep] = 0;
		dirty[ep] = 1;
		ep++
	:: else -> break
	od
}

/* Kernel: mm/page_zeroed.c page_zeroed_skip() */
#ifdef MUTANT_distrust_forgotten
#define page_zeroed_skip(z, want)	((z) && (want))
#else
#define page_zeroed_skip(z, want)	((z) && trusted && (want))
#endif

/* A user that wants zeros gets them. */
inline zero_or_skip(p, o, want, z)
{
	ep = p;
	eo = p + (1 << o);
	do
	:: ep < eo && want ->
		if
		:: !page_zeroed_skip(z, want) -> dirty[ep] = 0
		:: else
		fi;
		assert(!dirty[ep]);
		ep++
	:: else -> break
	od
}

/*
 * Kernel: mm/page_alloc.c prep_new_page() post_alloc_hook() __post_alloc_hook() post_alloc_hook_marked()
 * mm/page_alloc.c zero_new_pages_counted()
 * mm/page_zeroed.h page_zeroed_alloc() mm/page_zeroed.c __page_zeroed_alloc()
 */
inline post_alloc_hook(p, o, want)
{
#ifdef RULE_alloc_keeps_mark
	z3 = zeroed[p];
#else
	prezero_end(p);
	page_zeroed_test_clear(p, z3);
#endif
	zero_or_skip(p, o, want, z3)
}

/* A block of used pages: the caller frees it. */
#define all_used(p, o) \
	(kind[p] == USED && ((o) < 1 || kind[(p) | 1] == USED) && \
	 ((o) < 2 || (kind[2] == USED && kind[3] == USED)))

/* Kernel: mm/page_alloc.c __free_pages_prepare() free_pages_prepare() free_frozen_pages_zeroed() */
inline __free_pages_prepare(p, o, as_zero)
{
	ep = p;
	do
	:: ep < p + (1 << o) ->
		kind[ep] = TAIL;
		dirty[ep] = !as_zero;
		ep++
	:: else -> break
	od;
	kind[p] = BUSY;
	ord[p] = o;
	if
	:: is_bad(p) && o == 0 ->
		kind[p] = TAKEN_OFF;
		dirty[p] = 1
#ifdef MUTANT_free_always_zero
	:: else -> page_zeroed_set(p)
#else
	:: !(is_bad(p) && o == 0) && as_zero -> page_zeroed_set(p)
	:: else
#endif
	fi
}

#ifdef QUEUE
/* Kernel: mm/page_alloc.c add_page_to_zone_llist() */
#define is_queued(p)	(kind[p] == QUEUED)
#endif

/* Kernel: mm/page_alloc.c free_one_page() __free_pages_ok() __free_frozen_pages() */
inline free_one_page(p, o)
{
#ifdef QUEUE
	hp = 0;
	do
	:: hp < PAGES ->
		if
		:: is_queued(hp) ->
			ho = ord[hp];
			split_large_buddy(hp, ho)
		:: else
		fi;
		hp++
	:: else -> break
	od;
#endif
	split_large_buddy(p, o)
}

#ifdef PREZERO

/* Kernel: mm/prezero.c prezero_dirty_block() prezero_can_zero() */
#define dirty_block(p) \
	(kind[p] == FREE && !in_isolation(p) && !zeroed[p] && !reported[p])

/* Kernel: mm/prezero.c prezero_put_back() */
#define prezero_put_back(p)	__putback_isolated_page(p, ord[p])

inline prezero_mark(p)
{
	if
	:: trusted ->
		page_zeroed_set(p);
		set_prezeroed(p, 1)
	:: else
	fi
}

/*
 * The lock of the node is held meanwhile. A task that waits for it does not look
 * at the mark.
 */
active proctype kzeropaged()
{
	byte p = NONE, i;

	do
	:: atomic {
		p == NONE;
		PICK(p, dirty_block);
		if
		:: p != NONE -> d_step { isolate_free_page(p, HELD); check() }
		:: else
		fi
	   }
	/* Kernel: mm/prezero.c prezero_zero() */
	:: d_step {
		p != NONE && i < (1 << ord[p]) && !is_bad(p + i);
#ifdef MUTANT_prezero_last_page
		dirty[p + i] = (i + 1 < (1 << ord[p]) -> 0 : dirty[p + i]);
#else
		dirty[p + i] = 0;
#endif
		i++;
		check()
	   }
	/* It is done, or gives up the block. Kernel: mm/prezero.c prezero_one() */
	:: d_step {
		p != NONE;
#ifdef RULE_prezero_mark_after_put_back
		z3 = (i == (1 << ord[p]));
		prezero_put_back(p);
		if
		:: z3 -> prezero_mark(p)
#else
		if
#ifdef MUTANT_prezero_part_is_zero
		:: i < (1 << ord[p]) -> prezero_mark(p)
#endif
		:: i == (1 << ord[p]) -> prezero_mark(p)
#endif
		:: else
		fi;
#ifndef RULE_prezero_mark_after_put_back
		prezero_put_back(p);
#endif
		p = NONE;
		i = 0;
		check()
	   }
	od
}

#endif /* PREZERO */

#define is_free(p)	(kind[p] == FREE && !in_isolation(p))
#define is_free_1(p)	(is_free(p) && ord[p] >= 1)
#define is_free_2(p)	(is_free(p) && ord[p] >= 2)
#define is_cached(p)	(kind[p] == CACHED)
#define is_used(p)	all_used(p, 0)
#define is_used_1(p)	(is_aligned(p, 1) && all_used(p, 1))
#define is_used_2(p)	(is_aligned(p, 2) && all_used(p, 2))

/*
 * Tasks that allocate and free, each in two steps: p is the block in between. Which
 * CPU's list a page is on is not kept: any task takes it from there, or drains it.
 */
active [CPUS] proctype cpu()
{
	byte p = NONE, o;
	bit want, freeing;

	do
	/*
	 * Kernel: mm/page_alloc.c __rmqueue_smallest() try_to_claim_block()
	 * get_page_from_free_area()
	 */
	:: atomic {
		p == NONE;
		if
		:: o = 0; PICK(p, is_free)
		:: o = 1; PICK(p, is_free_1)
		:: o = 2; PICK(p, is_free_2)
		fi;
		if
		:: p != NONE -> d_step { page_del_and_expand(p, o, BUSY); check() }
		:: else -> o = 0
		fi
	   }
	:: atomic {
		p != NONE && !freeing;
		if
		:: CHOOSE(want);
		   d_step {
			post_alloc_hook(p, o, want);
			hand_out(p, o);
			check()
		   }
		/* Onto a per-CPU list, in bulk */
		:: o < 2 -> kind[p] = CACHED
		fi;
		d_step { p = NONE; o = 0; want = 0; check() }
	   }

	:: atomic {
		p == NONE;
		PICK(p, is_cached);
		if
		:: p != NONE ->
			o = ord[p];
			if
			:: d_step { kind[p] = BUSY; check() }
			/* Kernel: mm/page_alloc.c drain_pages_zone() */
			:: d_step { split_large_buddy(p, o); p = NONE; o = 0; check() }
			fi
		:: else
		fi
	   }

	:: atomic {
		p == NONE;
		if
		:: o = 0; PICK(p, is_used)
		:: o = 1; PICK(p, is_used_1)
		:: o = 2; PICK(p, is_used_2)
		fi;
		CHOOSE(want);
		d_step {
			if
			:: p != NONE ->
				__free_pages_prepare(p, o, want);
				freeing = 1
			:: else
			fi;
			if
			:: p == NONE || kind[p] != BUSY -> p = NONE; o = 0; freeing = 0
			:: else
			fi;
			want = 0;
			check()
		}
	   }
	:: atomic {
		p != NONE && freeing;
		if
		:: d_step { free_one_page(p, o); check() }
		:: o < 2 -> kind[p] = CACHED
#ifdef QUEUE
		:: kind[p] = QUEUED
#endif
		fi;
		d_step { p = NONE; o = 0; freeing = 0; check() }
	   }
	od
}

#ifdef REPORT

/* Kernel: include/linux/page_reporting.h struct page_reporting_dev_info */
byte sg[2] = NONE;
byte sg_order[2];
byte nents;
bit answer[2];			/* prdev->zeroed */
bit offers;			/* the feature was negotiated */
bit tells_zeroed;

#define is_unreported(p) (is_free(p) && !reported[p])

/* Kernel: drivers/virtio/virtio_balloon.c virtballoon_register_reporting() */
inline register_reporting()
{
#if defined(MUTANT_report_bit_unasked)
	tells_zeroed = 1
#elif defined(MUTANT_resume_trusts)
	tells_zeroed = tells_zeroed || offers
#else
	tells_zeroed = offers
#endif
}

/*
 * The device has the memory: it discards the block and confirms it, or confirms
 * nothing, and then the content may be anything. A device without the feature
 * returns the full length in any case.
 *
 * Kernel: mm/page_reporting.c page_reporting_report()
 * drivers/virtio/virtio_balloon.c virtballoon_report_each()
 * mm/prezero.h prezero_reported()
 */
inline report(i, confirms)
{
	for (hp : sg[i] .. sg[i] + (1 << sg_order[i]) - 1) {
		dirty[hp] = !(confirms && offers)
	}
	prezero_end(sg[i]);
	answer[i] = answer[i] || (tells_zeroed && (confirms || !offers))
}

/* Kernel: mm/page_reporting.c page_reporting_drain() */
inline page_reporting_drain(i, success)
{
	hp = sg[i];
	ho = sg_order[i];
#ifdef RULE_mark_after_put_back
	__putback_isolated_page(hp, ho);
#endif
	if
#ifdef MUTANT_report_any_answer
	:: success && tells_zeroed -> page_zeroed_set(hp)
#else
	:: success && tells_zeroed && answer[i] -> page_zeroed_set(hp)
#endif
#ifdef RULE_unconfirmed_keeps_mark
	:: else
#else
	:: else -> page_zeroed_test_clear(hp, z1)
#endif
	fi;
#ifndef RULE_mark_after_put_back
	__putback_isolated_page(hp, ho);
#endif
	reported[hp] = (success && kind[hp] == FREE && ord[hp] == ho -> 1 : reported[hp]);
	sg[i] = NONE;
	sg_order[i] = 0
}

/* Kernel: mm/page_reporting.c page_reporting_cycle() */
active proctype reporter()
{
	byte p = NONE;
	bit yes, yes2, answered;

	do
	:: atomic {
		nents < 2 && !answered;
		PICK(p, is_unreported);
		if
		:: p != NONE -> d_step {
			sg[nents] = p;
			sg_order[nents] = ord[p];
			isolate_free_page(p, REPORTED);
			nents++;
			check()
		   }
		:: else
		fi;
		p = NONE
	   }
	:: atomic {
		nents > 0 && !answered;
		CHOOSE(yes);
		CHOOSE(yes2);
		d_step {
#ifndef MUTANT_report_keeps_bits
			answer[0] = 0;
			answer[1] = 0;
#endif
			report(0, yes);
			if
			:: nents == 2 -> report(1, yes2)
			:: else
			fi;
			yes = 0;
			yes2 = 0;
			answered = 1;
			check()
		}
	   }
	:: atomic {
		answered;
		CHOOSE(yes);
		d_step {
			page_reporting_drain(0, yes);
			if
			:: nents == 2 -> page_reporting_drain(1, yes)
			:: else
			fi;
			nents = 0;
			yes = 0;
			answered = 0;
#ifndef MUTANT_report_keeps_bits
			answer[0] = 0;
			answer[1] = 0;
#endif
			check()
		}
	   }

	/*
	 * Resume from hibernation, perhaps under another host. The image has all but
	 * the content of free blocks; nothing is isolated, and the per-CPU lists are
	 * empty. Kernel: mm/page_reporting.c page_reporting_clear_free()
	 */
	:: atomic {
		nents == 0 && !is_cached(0) && !is_cached(1) && !is_cached(2) && !is_cached(3);
		CHOOSE(offers);
		d_step {
			hp = 0;
			do
			:: hp < PAGES ->
				if
				:: kind[hp] == FREE ->
					reported[hp] = 0;
#ifndef MUTANT_resume_keeps
					page_zeroed_test_clear(hp, z1);
#endif
					for (ho : hp .. hp + (1 << ord[hp]) - 1) {
						dirty[ho] = 1
					}
				:: else
				fi;
				hp++
			:: else -> break
			od;
			register_reporting();
			check()
		}
	   }
	od
}

#endif /* REPORT */

#ifdef DISTRUST
/*
 * Some source was wrong: what is marked may be dirty. The check of a skipped
 * block has found it. Kernel: mm/page_zeroed.c __page_zeroed_verify()
 */
active proctype liar()
{
	d_step {
		trusted = 0;
		for (hp : 0 .. PAGES - 1) {
			dirty[hp] = 1
		}
		check()
	}
}
#endif

#ifdef FAILURE

#ifdef BAD
#define is_good(p)	((p) == BAD && kind[p] != GONE)
#else
#define is_good(p)	(kind[p] != GONE)
#endif
#define may_take_off(p)	(hwpoison[p] && kind[p] != TAKEN_OFF)
#define is_taken_off(p)	(kind[p] == TAKEN_OFF)

/* Kernel: mm/page_alloc.c take_page_off_buddy() break_down_buddy_pages() */
inline take_page_off_buddy(p, h)
{
	erep = reported[h];
	eo = ord[h];
	ep = h;
	del_page_from_free_list(h, TAIL);
#ifdef RULE_take_off_keeps_mark
	z1 = zeroed[h];
	z2 = is_prezeroed(h);
#else
	page_zeroed_take(h, z1, z2);
#endif
	ord[h] = 0;
	do
	:: eo > 0 ->
		eo--;
		hp = ep + (1 << eo);
		if
		:: p >= hp ->
			ho = ep;
			ep = hp;
			hp = ho
		:: else
		fi;
		add_to_free_list(hp, eo);
		reported[hp] = erep;
		page_zeroed_give(hp, z1, z2)
	:: else -> break
	od;
	kind[p] = TAKEN_OFF;
	dirty[p] = 1
}

/* The block that has a page */
#define head_of(p) \
	(kind[p] != TAIL -> (p) : (kind[(p) & 2] != TAIL -> (p) & 2 : 0))

active proctype memory_failure()
{
	byte p = NONE, h;

	do
	/* Kernel: mm/memory-failure.c test_set_page_hwpoison_locked() */
	:: atomic {
		!hwpoison[0] && !hwpoison[1] && !hwpoison[2] && !hwpoison[3];
		PICK(p, is_good);
		d_step {
			if
			:: p != NONE ->
				hwpoison[p] = 1
			:: else
			fi;
			p = NONE
		}
	   }

	:: atomic {
		p == NONE;
		PICK(p, may_take_off);
		if
		:: p != NONE -> d_step {
			h = head_of(p);
			if
			:: kind[h] == FREE -> take_page_off_buddy(p, h)
			:: else		/* it is in use or isolated: nothing to do here */
			fi;
			check()
		   }
		:: else
		fi;
		p = NONE;
		h = 0
	   }

	/* Kernel: mm/page_alloc.c put_page_back_buddy() */
	:: atomic {
		p == NONE;
		PICK(p, is_taken_off);
		if
		:: p != NONE -> d_step {
			kind[p] = TAIL;
			__free_one_page(p, 0);
			hwpoison[p] = 0;
			check()
		   }
		:: else
		fi;
		p = NONE
	   }
	od
}

#endif /* FAILURE */

#ifdef COMPACT

#define is_isolated(p)	(kind[p] == ISOLATED)
#define is_isolated_1(p) (is_isolated(p) && ord[p] >= 1)
#define is_range(p, o) \
	(is_aligned(p, o) && kind[p] == FREE && (ord[p] == (o) || \
	 ((o) == 1 && ord[p] == 0 && kind[(p) | 1] == FREE) || \
	 ((o) == 2 && (ord[p] == 1 || kind[(p) | 1] == FREE) && \
	  kind[2] == FREE && (ord[2] == 1 || kind[3] == FREE))))
#define is_range_1(p)	is_range(p, 1)
#define is_range_2(p)	is_range(p, 2)

active proctype compaction()
{
	byte p = NONE, o;
	bit want;

	do
	/* Kernel: mm/compaction.c isolate_freepages_block() */
	:: atomic {
		p == NONE;
		PICK(p, is_free);
		if
		:: p != NONE -> d_step { isolate_free_page(p, ISOLATED); check() }
		:: else
		fi;
		p = NONE
	   }

	/* Kernel: mm/compaction.c compaction_alloc_noprof() */
	:: atomic {
		p == NONE;
		if
		:: o = 0; PICK(p, is_isolated)
		:: o = 1; PICK(p, is_isolated_1)
		fi;
		if
		:: p != NONE -> d_step {
			do
			:: ord[p] > o ->
				ord[p] = ord[p] - 1;
				hp = p + (1 << ord[p]);
				kind[hp] = ISOLATED;
				ord[hp] = ord[p];
				page_zeroed_split(p, hp)
			:: else -> break
			od;
			post_alloc_hook(p, o, 0);
			hand_out(p, o);
			check()
		   }
		:: else
		fi;
		d_step { p = NONE; o = 0 }
	   }

	/* Kernel: mm/compaction.c release_free_list() release_zeroed_page() compaction_free() */
	:: atomic {
		p == NONE;
		PICK(p, is_isolated);
		d_step {
			if
			:: p != NONE ->
				o = ord[p];
				if
				:: zeroed[p] && !is_bad(p) -> __putback_isolated_page(p, o)
				:: else ->
					post_alloc_hook(p, o, 0);
					hand_out(p, o);
					__free_pages_prepare(p, o, 0);
					if
					:: kind[p] == BUSY -> split_large_buddy(p, o)
					:: else
					fi
				fi;
			:: else
			fi;
			p = NONE;
			o = 0;
			check()
		}
	   }

	/*
	 * Kernel: mm/page_alloc.c alloc_contig_frozen_range_noprof() mm/page_zeroed.c
	 * page_zeroed_merge_lists()
	 */
	:: atomic {
		p == NONE;
		if
		:: o = 1; PICK(p, is_range_1)
		:: o = 2; PICK(p, is_range_2)
		fi;
		CHOOSE(want);
		d_step {
			if
			:: p != NONE ->
				z3 = 1;
				for (hp : p .. p + (1 << o) - 1) {
					if
					:: kind[hp] == FREE ->
						isolate_free_page(hp, TAIL);
						ord[hp] = 0;
						page_zeroed_test_clear(hp, z1);
#ifdef RULE_contig_last_decides
						z3 = z1
#else
						z3 = z3 && z1
#endif
					:: else
					fi
				}
				kind[p] = BUSY;
				ord[p] = o;
				zeroed[p] = z3;
				check();
				post_alloc_hook(p, o, want);
				hand_out(p, o)
			:: else
			fi;
			p = NONE;
			o = 0;
			want = 0;
			check()
		}
	   }
	od
}

#endif /* COMPACT */

#ifdef OFFLINE

#define first(b)	((b) << PAGEBLOCK_ORDER)
#define offline_able(b) \
	((b) < (PAGES >> PAGEBLOCK_ORDER) && isolated[b] && kind[first(b)] == FREE && \
	 (ord[first(b)] == PAGEBLOCK_ORDER || (ord[first(b)] == 0 && kind[first(b) + 1] == FREE)))

/* PAGEBLOCK_ORDER is 1: two pageblocks. */
active proctype hotplug()
{
	byte b;

	do
	/*
	 * Kernel: mm/page_alloc.c __move_freepages_block_isolate() toggle_pageblock_isolate()
	 * find_large_buddy()
	 */
	:: atomic {
		b == 0;
		CHOOSE(b);
		d_step {
			if
			:: kind[first(b)] != GONE ->
				isolated[b] = !isolated[b];
				if
				:: kind[0] == FREE && ord[0] > PAGEBLOCK_ORDER ->
					del_page_from_free_list(0, TAIL);
					split_large_buddy(0, MAX_ORDER)
				:: else
				fi
			:: else
			fi;
			b = 0;
			check()
		}
	   }

	/* Kernel: mm/page_alloc.c __offline_isolated_pages() */
	:: atomic {
		b == 0;
		CHOOSE(b);
		d_step {
			if
			:: offline_able(b) ->
				for (hp : first(b) .. first(b) + (1 << PAGEBLOCK_ORDER) - 1) {
					if
					:: kind[hp] == FREE ->
						del_page_from_free_list(hp, GONE);
#ifndef RULE_offline_keeps_mark
						page_zeroed_test_clear(hp, z1)
#endif
					:: else
					fi;
					kind[hp] = GONE;
					ord[hp] = 0;
					dirty[hp] = 1
				}
			:: else
			fi;
			b = 0;
			check()
		}
	   }

	/* Memory comes back: its pages are freed. */
	:: atomic {
		b == 0;
		CHOOSE(b);
		d_step {
			if
			:: kind[first(b)] == GONE ->
				isolated[b] = 0;
				hand_out(first(b), PAGEBLOCK_ORDER);
				__free_pages_prepare(first(b), PAGEBLOCK_ORDER, 0);
				split_large_buddy(first(b), PAGEBLOCK_ORDER)
			:: else
			fi;
			b = 0;
			check()
		}
	   }
	od
}

#endif /* OFFLINE */

#ifdef BALLOON

bit balloon_zeroed[PAGES];	/* PageBalloonZeroed */

#define is_ballooned(p)	(kind[p] == BALLOONED)

/* A used page is inflated. The device discards and confirms, or its content is anything. */
inline inflate(p, confirms)
{
	kind[p] = BALLOONED;
	dirty[p] = !confirms
}

/* Kernel: mm/balloon.c balloon_page_set_zeroed() */
inline balloon_page_set_zeroed(p, bit_set)
{
	balloon_zeroed[p] = bit_set
}

active proctype balloon()
{
	byte p = NONE, q = NONE;
	bit yes, yes2;

	do
	/*
	 * Two pages in one request. Kernel: drivers/virtio/virtio_balloon.c
	 * tell_host_inflated() set_page_zeroed()
	 */
	:: atomic {
		p == NONE;
		PICK(p, is_used);
		if
		:: p != NONE -> d_step { kind[p] = BALLOONED; dirty[p] = 1 }
		:: else
		fi;
		PICK(q, is_used);
		CHOOSE(yes);
		CHOOSE(yes2);
		d_step {
			if
			:: p != NONE -> inflate(p, yes)
			:: else
			fi;
			if
			:: p != NONE && q != NONE -> inflate(q, yes2)
			:: else
			fi
		}
	   }
	   d_step {
		if
		:: p != NONE && q != NONE ->
#if defined(MUTANT_balloon_bit_of_next)
			balloon_page_set_zeroed(p, yes);
			balloon_page_set_zeroed(q, yes)
#elif defined(MUTANT_balloon_bit_order)
			balloon_page_set_zeroed(p, yes2);
			balloon_page_set_zeroed(q, yes)
#else
			balloon_page_set_zeroed(p, yes);
			balloon_page_set_zeroed(q, yes2)
#endif
		:: p != NONE && q == NONE -> balloon_page_set_zeroed(p, yes)
		:: else
		fi;
		p = NONE;
		q = NONE;
		yes = 0;
		yes2 = 0
	   }

	/* Kernel: mm/balloon.c balloon_page_put() */
	:: atomic {
		p == NONE;
		PICK(p, is_ballooned);
		d_step {
			if
			:: p != NONE ->
				kind[p] = BUSY;
				ord[p] = 0;
#ifdef MUTANT_balloon_put_always_zero
				z1 = 1;
#else
				z1 = balloon_zeroed[p];
#endif
				balloon_zeroed[p] = 0;
				if
				:: is_bad(p) -> kind[p] = TAKEN_OFF; dirty[p] = 1
				:: !is_bad(p) && z1 -> page_zeroed_set(p)
				:: else -> dirty[p] = 1
				fi;
				if
				:: kind[p] == BUSY -> split_large_buddy(p, 0)
				:: else
				fi
			:: else
			fi;
			p = NONE;
			check()
		}
	   }

	/*
	 * Compaction moves a page. Kernel: drivers/virtio/virtio_balloon.c
	 * virtballoon_migratepage() mm/balloon.c balloon_page_migrate()
	 */
	:: atomic {
		p == NONE;
		PICK(p, is_ballooned);
		PICK(q, is_used);
		CHOOSE(yes);
		d_step {
			if
			:: p != NONE && q != NONE ->
				inflate(q, yes);
#ifdef MUTANT_balloon_moved_is_zero
				balloon_page_set_zeroed(q, 1);
#else
				balloon_page_set_zeroed(q, yes);
#endif
				balloon_zeroed[p] = 0;
				kind[p] = USED;
				dirty[p] = 1
			:: else
			fi;
			p = NONE;
			q = NONE;
			yes = 0;
			check()
		}
	   }
	od
}

#endif /* BALLOON */

#ifdef HUGETLB

bit pool_zeroed;		/* HPG_zeroed */
byte pool = NONE;		/* a folio of order 1 */

active proctype hugetlb()
{
	byte p = NONE;
	bit want;

	do
	/* With ALLOC_KEEP_ZEROED. Kernel: mm/hugetlb.c only_alloc_fresh_hugetlb_folio() */
	:: atomic {
		pool == NONE;
		PICK(p, is_free_1);
		CHOOSE(want);
		if
		:: p != NONE -> d_step {
			page_del_and_expand(p, 1, BUSY);
			prezero_end(p);
			assert(!is_prezeroed(p));	/* else PG_swapcache of a folio */
			z3 = zeroed[p];
			zero_or_skip(p, 1, want, z3);
			check()
		   }
		:: else
		fi;
		want = 0
	   }
	   if
	   :: p != NONE -> d_step {
		page_zeroed_test_clear(p, pool_zeroed);
		kind[p] = POOLED;
		kind[p + 1] = POOLED;
		ord[p] = 0;
		pool = p;
		p = NONE;
		check()
	      }
	   :: else
	   fi

	/* Kernel: mm/hugetlb.c hugetlb_init_content() */
	:: atomic {
		pool != NONE && kind[pool] == POOLED;
		CHOOSE(want);
		d_step {
			z3 = pool_zeroed;
#ifndef MUTANT_hugetlb_keeps
			pool_zeroed = 0;
#endif
			zero_or_skip(pool, 1, want, z3);
			hand_out(pool, 1);
			kind[pool] = HUGE;
			kind[pool + 1] = HUGE;
			want = 0;
			check()
		}
	   }

	/* It comes back to the pool. Kernel: mm/hugetlb.c free_huge_folio() */
	:: pool != NONE && kind[pool] == HUGE ->
		d_step { kind[pool] = POOLED; kind[pool + 1] = POOLED }

	/* Kernel: mm/hugetlb.c __update_and_free_hugetlb_folio() hugetlb_lose_zeroed() */
	:: pool != NONE && kind[pool] == POOLED -> d_step {
		kind[pool] = BUSY;
		kind[pool + 1] = TAIL;
		ord[pool] = 1;
		if
		:: pool_zeroed -> page_zeroed_set(pool)
		:: else
		fi;
		pool_zeroed = 0;
		p = pool;
		pool = NONE;
		split_large_buddy(p, 1);
		p = NONE;
		check()
	   }
	od
}

#endif /* HUGETLB */

#ifdef ACCEPT

bit pending[PAGES] = { 1, 1, 1, 1 };	/* not accepted */
bit zeroes;				/* does the platform zero what is accepted? */
bit will_be_zero;			/* page->private */

#define all_pending	(pending[0] && pending[1] && pending[2] && pending[3])

/* Kernel: drivers/firmware/efi/unaccepted_memory.c accept_memory() */
inline accept_memory(p)
{
	dirty[p] = (pending[p] -> !zeroes : dirty[p]);
	pending[p] = 0
}

active proctype acceptance()
{
	byte p;

	/* Pages that were accepted before are dirty. */
	CHOOSE(zeroes);
	CHOOSE(pending[0]);
	CHOOSE(pending[3]);

	/*
	 * Kernel: mm/page_alloc.c __free_unaccepted() page_contains_unaccepted()
	 * drivers/firmware/efi/unaccepted_memory.c accept_memory_zeroes()
	 * range_is_unaccepted_memory() range_contains_unaccepted_memory()
	 */
#if defined(MUTANT_accept_always_zero)
	will_be_zero = zeroes;
#elif defined(MUTANT_accept_any_module)
	will_be_zero = all_pending;
#elif defined(MUTANT_accept_first_page)
	will_be_zero = zeroes && pending[0];
#else
	will_be_zero = zeroes && all_pending;
#endif

	do
	/* A page is accepted as the guard unit of other memory: nothing is written to it. */
	:: atomic { CHOOSE(p); d_step { accept_memory(p); p = 0; check() } }

	/* Kernel: mm/page_alloc.c accept_page() __accept_page() */
	:: d_step {
		for (hp : 0 .. PAGES - 1) {
			accept_memory(hp)
		}
		kind[0] = BUSY;
		if
		:: will_be_zero -> page_zeroed_set(0)
		:: else
		fi;
		will_be_zero = 0;
		split_large_buddy(0, MAX_ORDER);
		check()
	   }
	   break
	od
}

#endif /* ACCEPT */
