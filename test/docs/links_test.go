// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package docs

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"
)

// link is a link of a page.
type link struct {
	line   int
	target string
}

var (
	code     = regexp.MustCompile("`(?:[^`\n]|\n[^`\n])*`") // in one paragraph
	linked   = regexp.MustCompile(`\[([^\]]*)\]\(([^)\s]+)\)`)
	headline = regexp.MustCompile(`^#+ +(.*)$`)
)

// links returns the page's links. The text of one may be over two lines, and code in it have brackets.
func (p page) links() []link {
	var found []link
	prose := code.ReplaceAllStringFunc(strings.Join(p.prose, "\n"), func(span string) string {
		return strings.Repeat("\n", strings.Count(span, "\n"))
	})
	for _, at := range linked.FindAllStringSubmatchIndex(prose, -1) {
		found = append(found, link{1 + strings.Count(prose[:at[4]], "\n"), prose[at[4]:at[5]]})
	}
	return found
}

// anchors are the names of a page's headings, as hosts of Git repositories make them.
func (p page) anchors() map[string]bool {
	found := map[string]bool{}
	for _, line := range p.prose {
		heading := headline.FindStringSubmatch(line)
		if heading == nil {
			continue
		}
		name := anchor(heading[1])
		unique := name
		for i := 1; found[unique]; i++ {
			unique = fmt.Sprintf("%s-%d", name, i)
		}
		found[unique] = true
	}
	return found
}

func anchor(heading string) string {
	heading = linked.ReplaceAllString(heading, "$1")
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
			return unicode.ToLower(r)
		case r == ' ':
			return '-'
		}
		return -1
	}, heading)
}

func TestAnchor(t *testing.T) {
	require.Equal(t, "from-prepare-failedpreparedynamicresources", anchor("From Prepare: FailedPrepareDynamicResources"))
	require.Equal(t, "1-a-deviceclass-per-kind-of-device", anchor("1. A DeviceClass per kind of device"))
	require.Equal(t, "the-vlan_id-of-a-vf", anchor("The `vlan_id` of a [VF](reference.md#vf)"))
}

func TestReadPage(t *testing.T) {
	p, err := readPage("a.md", "# A\n\n[One\nhere](b.md), `[no](c.md)`, [`two`](d.md#e)\n\n```text\n# B\n[no](f.md)\n```\n\n## A\n")
	require.NoError(t, err)
	require.Equal(t, []link{{4, "b.md"}, {4, "d.md#e"}}, p.links())
	require.Equal(t, map[string]bool{"a": true, "a-1": true}, p.anchors())
}

// TestLinks follows each link within the repository.
func TestLinks(t *testing.T) {
	all, err := readPages(root)
	require.NoError(t, err)
	anchors := map[string]map[string]bool{}
	for _, p := range all {
		anchors[p.file] = p.anchors()
	}
	seen := 0
	for _, p := range all {
		for _, l := range p.links() {
			if strings.Contains(l.target, "://") {
				continue
			}
			seen++
			where := fmt.Sprintf("%s:%d: %s", p.file, l.line, l.target)
			file, name, named := strings.Cut(l.target, "#")
			target := p.file
			if file != "" {
				target = path.Join(path.Dir(p.file), file)
			}
			_, err := os.Stat(filepath.Join(root, target))
			require.NoError(t, err, where)
			if named {
				require.Contains(t, anchors, target, "%s: an anchor in what is no page", where)
				require.True(t, anchors[target][name], "%s: no such heading", where)
			}
		}
	}
	require.Greater(t, seen, 50, "links are found")
}

// TestTables says that no table breaks off at a blank line: what follows it would be shown with its bars.
func TestTables(t *testing.T) {
	all, err := readPages(root)
	require.NoError(t, err)
	tables := 0
	for _, p := range all {
		before := ""
		for i, line := range p.prose {
			row := strings.HasPrefix(strings.TrimSpace(line), "|")
			if row && !strings.HasPrefix(strings.TrimSpace(before), "|") {
				tables++
				require.Greater(t, len(p.prose), i+1, "%s:%d: a row without a table", p.file, i+1)
				require.Empty(t, strings.Trim(p.prose[i+1], " |:-"), "%s:%d: a row without a table: %s", p.file, i+1, line)
				require.NotEmpty(t, p.prose[i+1], "%s:%d: a row without a table: %s", p.file, i+1, line)
			}
			before = line
		}
	}
	require.NotZero(t, tables)
}

// TestPagesAreLinked says that a reader can get to each page.
func TestPagesAreLinked(t *testing.T) {
	all, err := readPages(root)
	require.NoError(t, err)
	linked := map[string]bool{"README.md": true}
	for _, p := range all {
		for _, l := range p.links() {
			file, _, _ := strings.Cut(l.target, "#")
			linked[path.Join(path.Dir(p.file), file)] = true
		}
	}
	for _, p := range all {
		require.True(t, linked[p.file] || linked[path.Dir(p.file)], "no link to %s", p.file)
	}
}

var example = regexp.MustCompile(`examples/[\w.-]+\.yaml`)

// TestExamples says that each example is on a page, and what a page names is there.
func TestExamples(t *testing.T) {
	all, err := readPages(root)
	require.NoError(t, err)
	named := map[string]bool{}
	for _, p := range all {
		for _, file := range example.FindAllString(p.source, -1) {
			named[file] = true
			_, err := os.Stat(filepath.Join(root, file))
			require.NoError(t, err, "named in %s", p.file)
		}
		for _, l := range p.links() {
			named[path.Join(path.Dir(p.file), l.target)] = true
		}
	}
	files, err := filepath.Glob(filepath.Join(root, "examples", "*.yaml"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		require.True(t, named["examples/"+filepath.Base(file)], "%s is on no page", file)
	}
}
