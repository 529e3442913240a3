// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package truncate

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestUTF8(t *testing.T) {
	for _, tt := range []struct {
		text  string
		limit int
		want  string
	}{
		{"", 0, ""}, {"abc", 3, "abc"}, {"abcd", 3, "abc"}, {"abc", 0, ""},
		{"aä", 2, "a"}, {"aä", 3, "aä"}, {"€€", 5, "€"}, {"ää", 1, ""},
		{"a\xffb", 9, "a?b"}, {"a\xff\xfeb", 2, "a?"}, {"ab\xe2\x82", 3, "ab?"},
	} {
		require.Equal(t, tt.want, UTF8(tt.text, tt.limit), "%q to %d", tt.text, tt.limit)
	}
}
