// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package truncate makes texts fit the limits of the Kubernetes API.
package truncate

import (
	"strings"
	"unicode/utf8"
)

// UTF8 returns the beginning of the text, at most limit bytes of it and cut between two characters. Bytes that are no
// UTF-8, which names from the kernel may have, become question marks.
func UTF8(text string, limit int) string {
	text = strings.ToValidUTF8(text, "?")
	if len(text) <= limit {
		return text
	}
	for !utf8.RuneStart(text[limit]) {
		limit--
	}
	return text[:limit]
}
