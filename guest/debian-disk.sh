#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# Make a disk with a Debian and the scripts of guest/programs. Each names its packages, and prepares itself in the system.
#
# debian-disk.sh MMDEBSTRAP SUITE SOURCES DISK SCRIPT...
#
# MMDEBSTRAP is the unpacked package, SOURCES apt's list of mirrors.
set -eu
mmdebstrap=$1/usr/bin/mmdebstrap suite=$2 sources=$3 disk=$4
shift 4
# The archive of the system, its files, and the disk.
need=10
free=$(($(df --output=avail -B 1000000000 "${disk%/*}" | tail -n 1)))
if [ "$free" -lt $need ]; then
	echo "error: $free GB are free in ${disk%/*}, $need GB are needed: free some space, or set KNOWNZERO_CACHE"
	exit 1
fi
packages=$(sed -n 's/^# packages: //p' "$@" | tr ' ' '\n' | sort -u | paste -sd, -)
# Disks of older scripts.
find "${disk%/*}" -name '*.ext4' -mtime +7 -delete
work=$(mktemp -d "$disk.XXXXXX")
trap 'rm -rf "$work"' EXIT
# As root, this mode has namespaces of mounts and processes; for other users mmdebstrap finds a mode.
mode=unshare owners_in='' owners_out=''
if [ "$(id -u)" != 0 ]; then
	mode=auto owners_in="fakeroot -s $work/owners --" owners_out="fakeroot -i $work/owners --"
fi
perl "$mmdebstrap" --mode=$mode --variant=apt --skip=output/dev --include="$packages" \
	--customize-hook='mkdir -p "$1/programs" "$1/kz"' \
	--customize-hook="copy-in $* /programs" \
	--customize-hook='for one in "$1"/programs/*; do chroot "$1" sh -eu "/programs/${one##*/}" prepare || exit 1; done' \
	--customize-hook='rm -rf "$1"/var/cache/apt/*.bin "$1"/var/lib/apt/lists/*' \
	"$suite" "$work/root.tar" "$sources"
mkdir "$work/tree"
# shellcheck disable=SC2086
$owners_in tar -x -p --numeric-owner -C "$work/tree" -f "$work/root.tar"
rm "$work/root.tar"
mkdir "$work/tree/dev"
# shellcheck disable=SC2086
$owners_out mke2fs -q -F -t ext4 -m 0 -d "$work/tree" "$disk" 6G
