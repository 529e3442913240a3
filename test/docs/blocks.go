// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package docs reads the documentation's pages, so that tests can hold it to what it says.
package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Languages of blocks.
const (
	Shell = "sh"
	YAML  = "yaml"
)

// Marks of Shell blocks say where the commands run. Without a mark they run anywhere with kubectl, helm and the
// repository as the working directory, on a cluster whose nodes are as the lab's. The blocks of a page run in their order.
const (
	// OnNode is for commands of root on node1.
	OnNode = "node"
	// OnRepository is for commands that build or test the repository, which targets of the Makefile or CI cover.
	OnRepository = "repo"
	// OwnCluster is for commands that need a cluster of the reader's: with Cilium, a registry or hardware. The page says so.
	OwnCluster = "own-cluster"
)

// Marks of YAML blocks. Without a mark a block is whole objects.
const (
	// Values is for values of the Helm chart.
	Values = "values"
	// Part is for a part of an object, or one of a kind that is not part of this project.
	Part = "part"
)

// marks are all marks by language. Blocks in languages without marks are for reading alone.
var marks = map[string][]string{
	Shell:  {"", OnNode, OnRepository, OwnCluster},
	YAML:   {"", Values, Part},
	"json": {""},
	"toml": {""},
	"text": {""},
}

// pages are the pages' files.
var pages = []string{"*.md", "Documentation/*.md", "examples/README.md", "test/lab/README.md"}

// Block is a fenced block of a page.
type Block struct {
	// File is the page's path below the repository's root.
	File string
	// Line is that of the opening fence, from 1.
	Line int
	// Lang and Mark are the first and the second word after the fence.
	Lang, Mark string
	// Text is what is between the fences.
	Text string
}

// String tells where the block is.
func (b Block) String() string { return fmt.Sprintf("%s:%d", b.File, b.Line) }

// Blocks returns the fenced blocks of all pages of a repository page by page, and of each page from top to bottom. A block
// of code without fences is an error, and so is one that does not end.
func Blocks(root string) ([]Block, error) {
	all, err := readPages(root)
	if err != nil {
		return nil, err
	}
	var blocks []Block
	for _, p := range all {
		blocks = append(blocks, p.blocks...)
	}
	return blocks, nil
}

// page is a page that has been read.
type page struct {
	file   string
	source string
	blocks []Block
	// prose has the page's lines, from line 1 at index 0; those of blocks are empty.
	prose []string
}

func readPages(root string) ([]page, error) {
	var all []page
	for _, pattern := range pages {
		paths, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return nil, err
		}
		if len(paths) == 0 {
			return nil, fmt.Errorf("no page %s in %s", pattern, root)
		}
		for _, path := range paths {
			source, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			file, err := filepath.Rel(root, path)
			if err != nil {
				return nil, err
			}
			p, err := readPage(filepath.ToSlash(file), string(source))
			if err != nil {
				return nil, err
			}
			all = append(all, p)
		}
	}
	return all, nil
}

// fence matches a line that opens a block: its indentation, the fence and what the block is.
var fence = regexp.MustCompile("^( *)(```+|~~~+)([^`]*)$")

// readPage tells the blocks of a page from its prose. The pages use of Markdown what this understands: a line that is
// indented by four blanks after an empty one is code also in a list.
func readPage(file, source string) (page, error) {
	p := page{file: file, source: source}
	var (
		open   *Block // the block that the line is in
		indent string // of its fence
		marker string // its fence
		before string // the line above, without blanks around
	)
	for line := range strings.Lines(source) {
		text := strings.TrimSpace(line)
		prose := ""
		opening := fence.FindStringSubmatch(strings.TrimRight(line, "\n"))
		switch {
		case open != nil && strings.HasPrefix(text, marker) && strings.Trim(text, marker[:1]) == "":
			p.blocks = append(p.blocks, *open)
			open = nil
		case open != nil:
			open.Text += strings.TrimPrefix(line, indent)
		case before == "" && text != "" && strings.HasPrefix(line, "    "):
			return page{}, fmt.Errorf("%s:%d: a block without fences and language", file, len(p.prose)+1)
		case opening != nil:
			indent, marker = opening[1], opening[2]
			open = &Block{File: file, Line: len(p.prose) + 1}
			info := append(strings.Fields(opening[3]), "", "")
			open.Lang, open.Mark = info[0], info[1]
		default:
			prose = strings.TrimRight(line, "\n")
		}
		p.prose = append(p.prose, prose)
		before = text
	}
	if open != nil {
		return page{}, fmt.Errorf("%s: a block that does not end", *open)
	}
	return p, nil
}
