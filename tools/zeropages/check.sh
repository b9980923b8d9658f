#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# Runs zeropages on made-up /proc and /sys folders: sh check.sh PROGRAM
set -eu
program=$1
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root/proc" "$root/sys/kernel/mm/zero_page"
printf 'Node 0, zone Normal\n  pages free 1000\n        present 2000\n      nr_free_pages 1000\n' > "$root/proc/zoneinfo"
: > "$root/proc/cmdline"

vmstat() { # SET SKIP BAD
	printf 'pgzeroed_set_reported 0\npgzeroed_set_freed 0\npgzeroed_set_prezeroed %s\n' "$1" > "$root/proc/vmstat"
	printf 'pgzeroed_skip %s\npgzeroed_lost 0\npgzeroed_cleared 30\npgzeroed_bad %s\n' "$2" "$3" >> "$root/proc/vmstat"
}

failed=0
expect() { # CODE START-OF-THE-SENTENCE
	code=0
	said=$("$program" --root "$root" --check) || code=$?
	case $said in "$2"*) good=yes ;; *) good=no ;; esac
	if [ "$code" != "$1" ] || [ $good = no ]; then
		echo "zeropages --check: exit $code, '$said'; expected exit $1, '$2…'" >&2
		failed=1
	fi
}

echo "nr_free_pages 1000" > "$root/proc/vmstat"
expect 1 "No: this kernel"
vmstat 0 0 0
expect 1 "No: no source is on"
echo 1 > "$root/sys/kernel/mm/zero_page/enabled"
expect 3 "Not yet:"
vmstat 700 0 0
expect 0 "Ready:"
vmstat 700 10 0
expect 0 "Yes: "
"$program" --root "$root" --metrics | grep -qx 'knownzero_state{state="working"} 1' || failed=1
"$program" --root "$root" --metrics | grep -qx 'knownzero_skipped_bytes_total [1-9][0-9]*' ||
	failed=1
vmstat 700 10 2
expect 1 "No: 2 known-zero pages"
rm "$root/proc/zoneinfo"
code=0
"$program" --root "$root" --check 2>/dev/null || code=$?
[ $code = 3 ] || failed=1
[ $failed = 0 ] && echo "zeropages: all checks pass"
exit $failed
