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
	"github.com/yuin/goldmark/ast"
	extast "github.com/yuin/goldmark/extension/ast"
)

// link is a link of a page, line the line of its paragraph or row.
type link struct {
	line   int
	target string
}

func (p page) links(t *testing.T) []link {
	t.Helper()
	var found []link
	line := 1
	require.NoError(t, p.walk(func(node ast.Node) error {
		if node.Type() == ast.TypeBlock && node.Pos() >= 0 {
			line = p.line(node.Pos())
		}
		if l, ok := node.(*ast.Link); ok {
			found = append(found, link{line, string(l.Destination)})
		}
		return nil
	}))
	return found
}

// anchors are the names of a page's headings, as hosts of Git repositories make them.
func (p page) anchors(t *testing.T) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	require.NoError(t, p.walk(func(node ast.Node) error {
		heading, ok := node.(*ast.Heading)
		if !ok {
			return nil
		}
		name := anchor(plain(heading, p.source))
		unique := name
		for i := 1; found[unique]; i++ {
			unique = fmt.Sprintf("%s-%d", name, i)
		}
		found[unique] = true
		return nil
	}))
	return found
}

// plain is the text of a node without markup.
func plain(node ast.Node, source []byte) string {
	var b strings.Builder
	for child := node.FirstChild(); child != nil; child = child.NextSibling() {
		if text, ok := child.(*ast.Text); ok {
			b.Write(text.Value(source))
		} else {
			b.WriteString(plain(child, source))
		}
	}
	return b.String()
}

func anchor(heading string) string {
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
}

// TestLinks follows each link within the repository.
func TestLinks(t *testing.T) {
	all, err := readPages(root)
	require.NoError(t, err)
	anchors := map[string]map[string]bool{}
	for _, p := range all {
		anchors[p.file] = p.anchors(t)
	}
	seen := 0
	for _, p := range all {
		for _, l := range p.links(t) {
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
		require.NoError(t, p.walk(func(node ast.Node) error {
			switch node := node.(type) {
			case *extast.Table:
				tables++
			case *ast.Paragraph:
				text := string(node.Lines().Value(p.source))
				require.False(t, strings.HasPrefix(text, "|"), "%s:%d: a row without a table: %s", p.file, p.line(node.Pos()), text)
			}
			return nil
		}))
	}
	require.NotZero(t, tables)
}

// TestPagesAreLinked says that a reader can get to each page.
func TestPagesAreLinked(t *testing.T) {
	all, err := readPages(root)
	require.NoError(t, err)
	linked := map[string]bool{"README.md": true}
	for _, p := range all {
		for _, l := range p.links(t) {
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
		for _, file := range example.FindAllString(string(p.source), -1) {
			named[file] = true
			_, err := os.Stat(filepath.Join(root, file))
			require.NoError(t, err, "named in %s", p.file)
		}
		for _, l := range p.links(t) {
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
