#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# Chromium, headless, renders a small page
# packages: chromium fonts-dejavu-core
mkdir -p /srv/chromium
cd /srv/chromium
if [ "${1:-}" = prepare ]; then
	cat >page.html <<-'END'
		<!DOCTYPE html>
		<title>A small page</title>
		<h1>A small page</h1>
		<p id="text">The text of the page.</p>
		<script>
		const words = Array.from({ length: 200 }, (_, i) => `word ${i * 79 % 211}`).sort();
		document.getElementById("text").textContent = words.join(", ");
		</script>
	END
	exit
fi
rm -rf profile page.png
/usr/lib/chromium/chromium --headless --no-sandbox --disable-gpu --user-data-dir=/srv/chromium/profile \
	--window-size=640,480 --screenshot=/srv/chromium/page.png file:///srv/chromium/page.html >log 2>&1 || tail log
sha256sum page.png
