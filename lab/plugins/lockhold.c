// SPDX-License-Identifier: GPL-2.0
/*
 * lockhold: a QEMU TCG plugin that measures how long a guest's Linux kernel holds the spinlocks of its
 * zones (zone->lock), in instructions. For x86-64, one CPU, and a kernel at its usual place (nokaslr).
 *
 * The kernel takes and releases spinlocks out of line, in functions that arguments name (hexadecimal, END behind it):
 *
 *   lock=START-END     functions that take one, whose address is in RDI
 *   unlock=START-END   functions that release one
 *   learn=START-END    functions that take zone->lock and no other: every lock they take is one
 *
 * A hold is the instructions after the one that takes the lock, up to and including the one that
 * releases it. Its site is the address that the lock function returns to.
 *
 * The counts since the start of the guest stand in a file that may be read at any time; see the struct.
 * They only grow, so the difference of two looks is what a job adds.
 *
 * Arguments: out=FILE,KIND=START-END,…
 */
#include <inttypes.h>
#include <stdlib.h>

#include <glib.h>

#include "plugin.h"

#define RANGES 256
#define LOCKS 32
#define BITS 18
#define SLOTS (1u << BITS)

enum kind { LOCK, UNLOCK, LEARN, KINDS };

static const char *const names[KINDS] = { "lock", "unlock", "learn" };
static struct {
	uint64_t start, end;
} ranges[KINDS][RANGES];
static unsigned int nr_ranges[KINDS];

/* The file: 64-bit words of the machine. */
static struct {
	char magic[8];
	uint64_t slots;
	uint64_t lost;		/* holds without a free slot */
	uint64_t wrong;		/* a held lock was taken, or a free one was released */
	uint64_t taken, released;
	uint64_t nr_locks;
	uint64_t locks[LOCKS];
	struct {
		uint64_t site, length, count;	/* how often this caller held one for so long */
	} holds[SLOTS];
} *shown;

/* Of each lock in shown->locks. */
static struct {
	uint64_t caller;	/* of the lock function that is running */
	uint64_t site, since;
	bool held;
} states[LOCKS];

static qemu_plugin_u64 instructions;
static struct qemu_plugin_register *rdi, *rsp;
static GByteArray *bytes;

/* Is @address in a range of this kind, or, with @start, at the beginning of one? */
static bool in(enum kind kind, uint64_t address, bool start)
{
	unsigned int i;

	for (i = 0; i < nr_ranges[kind]; i++)
		if (start ? address == ranges[kind][i].start
			  : address >= ranges[kind][i].start && address < ranges[kind][i].end)
			return true;
	return false;
}

/* The index of a lock, or LOCKS if it is not one of a zone. */
static unsigned int known(uint64_t lock)
{
	unsigned int i;

	for (i = 0; i < shown->nr_locks; i++)
		if (shown->locks[i] == lock)
			return i;
	return LOCKS;
}

static uint64_t number(void)
{
	uint64_t value = 0;

	if (bytes->len >= sizeof(value))
		memcpy(&value, bytes->data, sizeof(value));
	return value;
}

static uint64_t value_of(struct qemu_plugin_register *reg)
{
	g_byte_array_set_size(bytes, 0);
	return qemu_plugin_read_register(reg, bytes) < 0 ? 0 : number();
}

static void note(uint64_t site, uint64_t length)
{
	unsigned int slot = (unsigned int)(((site * 31 + length) * 0x9e3779b97f4a7c15ull) >> (64 - BITS));
	unsigned int tries;

	for (tries = 0; tries < SLOTS; tries++, slot = (slot + 1) % SLOTS) {
		if (!shown->holds[slot].count) {
			shown->holds[slot].site = site;
			shown->holds[slot].length = length;
		}
		if (shown->holds[slot].site == site && shown->holds[slot].length == length) {
			shown->holds[slot].count++;
			return;
		}
	}
	shown->lost++;
}

/* Before a call that takes zone->lock. */
static void learn(unsigned int cpu, void *unused)
{
	const uint64_t lock = value_of(rdi);

	if (known(lock) < LOCKS)
		return;
	if (shown->nr_locks == LOCKS)
		shown->lost++;
	else
		shown->locks[shown->nr_locks++] = lock;
}

/* At the first instruction of a function that takes a lock: the return address is on top of the stack. */
static void entered(unsigned int cpu, void *unused)
{
	const unsigned int i = known(value_of(rdi));
	uint64_t top;

	if (i == LOCKS)
		return;
	top = value_of(rsp);
	g_byte_array_set_size(bytes, 0);
	states[i].caller = qemu_plugin_read_memory_vaddr(top, bytes, sizeof(uint64_t)) ? number() : 0;
}

/* A store to a lock; blocks are counted when they begin, and @after of this one come after the store. */
static void stored(unsigned int cpu, uint64_t address, qemu_plugin_meminfo_t info, void *after, bool take)
{
	const unsigned int i = known(address);
	uint64_t now;

	if (i == LOCKS || !qemu_plugin_mem_is_store(info))
		return;
	now = qemu_plugin_u64_get(instructions, cpu) - (uintptr_t)after;
	*(take ? &shown->taken : &shown->released) += 1;
	shown->wrong += states[i].held == take;
	if (take) {
		states[i].site = states[i].caller;
		states[i].since = now;
	} else if (states[i].held) {
		note(states[i].site, now - states[i].since);
	}
	states[i].held = take;
}

static void taken(unsigned int cpu, qemu_plugin_meminfo_t info, uint64_t address, void *after)
{
	stored(cpu, address, info, after, true);
}

static void released(unsigned int cpu, qemu_plugin_meminfo_t info, uint64_t address, void *after)
{
	stored(cpu, address, info, after, false);
}

/* Is it a direct call of a function that takes a lock? */
static bool calls_lock(const struct qemu_plugin_insn *insn)
{
	unsigned char code[5];
	int32_t distance;

	if (qemu_plugin_insn_data(insn, code, sizeof(code)) != sizeof(code) || code[0] != 0xe8)
		return false;
	memcpy(&distance, code + 1, sizeof(distance));
	return in(LOCK, qemu_plugin_insn_vaddr(insn) + sizeof(code) + (int64_t)distance, true);
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	const size_t n = qemu_plugin_tb_n_insns(tb);
	size_t i;

	qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(tb, QEMU_PLUGIN_INLINE_ADD_U64, instructions, n);
	if (!plugin_is_kernel(qemu_plugin_tb_vaddr(tb)))
		return;
	for (i = 0; i < n; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
		const uint64_t address = qemu_plugin_insn_vaddr(insn);
		const bool takes = in(LOCK, address, false);
		void *after = (void *)(uintptr_t)(n - 1 - i);

		if (in(LOCK, address, true))
			qemu_plugin_register_vcpu_insn_exec_cb(insn, entered, QEMU_PLUGIN_CB_R_REGS, NULL);
		if (takes || in(UNLOCK, address, false))
			qemu_plugin_register_vcpu_mem_cb(insn, takes ? taken : released, QEMU_PLUGIN_CB_NO_REGS,
							 QEMU_PLUGIN_MEM_W, after);
		else if (in(LEARN, address, false) && calls_lock(insn))
			qemu_plugin_register_vcpu_insn_exec_cb(insn, learn, QEMU_PLUGIN_CB_R_REGS, NULL);
	}
}

static void cpu_began(qemu_plugin_id_t id, unsigned int cpu)
{
	GArray *registers = qemu_plugin_get_registers();
	unsigned int i;

	for (i = 0; i < registers->len; i++) {
		const qemu_plugin_reg_descriptor *reg =
			&g_array_index(registers, qemu_plugin_reg_descriptor, i);

		if (!strcmp(reg->name, "rdi"))
			rdi = reg->handle;
		if (!strcmp(reg->name, "rsp"))
			rsp = reg->handle;
	}
	g_array_free(registers, TRUE);
	if (!rdi || !rsp) {
		fprintf(stderr, "lockhold: this CPU has no RDI and RSP; it takes an x86-64 guest\n");
		exit(1);
	}
}

/* Take an argument KIND=START-END; false if it is none. */
static bool add_range(const char *argument)
{
	enum kind kind = LOCK;
	uint64_t start, end;
	char name[8];

	if (sscanf(argument, "%7[^=]=%" SCNx64 "-%" SCNx64, name, &start, &end) != 3)
		return false;
	while (kind < KINDS && strcmp(name, names[kind]))
		kind++;
	if (kind == KINDS || nr_ranges[kind] == RANGES)
		return false;
	ranges[kind][nr_ranges[kind]].start = start;
	ranges[kind][nr_ranges[kind]++].end = end;
	return true;
}

QEMU_PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
					   char **argv)
{
	const char *out = plugin_argument(argc ? argv[0] : NULL, "out");
	int i;

	if (strcmp(info->target_name, "x86_64") || info->system.max_vcpus != 1) {
		fprintf(stderr, "lockhold: it takes an x86-64 guest with one CPU\n");
		return -1;
	}
	for (i = 1; i < argc; i++)
		if (!add_range(argv[i]))
			return -1;
	if (!out || !nr_ranges[LOCK] || !nr_ranges[UNLOCK] || !nr_ranges[LEARN])
		return -1;
	shown = plugin_share(out, sizeof(*shown));
	if (!shown)
		return -1;
	memcpy(shown->magic, "KZLOCKS1", sizeof(shown->magic));
	shown->slots = SLOTS;
	bytes = g_byte_array_new();
	instructions = qemu_plugin_scoreboard_u64(qemu_plugin_scoreboard_new(sizeof(uint64_t)));
	qemu_plugin_register_vcpu_init_cb(id, cpu_began);
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
