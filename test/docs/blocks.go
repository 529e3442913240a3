// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package docs reads the documentation's pages, so that tests can hold it to what it says.
package docs

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/text"
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
// of code without fences is an error.
func Blocks(root string) ([]Block, error) {
	all, err := readPages(root)
	if err != nil {
		return nil, err
	}
	var blocks []Block
	for _, p := range all {
		err := p.walk(func(node ast.Node) error {
			switch node := node.(type) {
			case *ast.CodeBlock:
				return fmt.Errorf("%s:%d: a block without fences and language", p.file, p.line(node.Pos()))
			case *ast.FencedCodeBlock:
				b := Block{File: p.file, Line: p.line(node.Pos()), Text: string(node.Lines().Value(p.source))}
				var info []string
				if node.Info != nil {
					info = strings.Fields(string(node.Info.Value(p.source)))
				}
				if len(info) > 0 {
					b.Lang = info[0]
				}
				if len(info) > 1 {
					b.Mark = info[1]
				}
				blocks = append(blocks, b)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return blocks, nil
}

// page is a parsed page.
type page struct {
	file   string
	source []byte
	root   ast.Node
}

func readPages(root string) ([]page, error) {
	var all []page
	parser := goldmark.New(goldmark.WithExtensions(extension.Table)).Parser()
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
			all = append(all, page{file: filepath.ToSlash(file), source: source, root: parser.Parse(text.NewReader(source))})
		}
	}
	return all, nil
}

// walk visits the nodes in the order of the page, until an error.
func (p page) walk(visit func(ast.Node) error) error {
	return ast.Walk(p.root, func(node ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		return ast.WalkContinue, visit(node)
	})
}

// line returns the line of a place in the source.
func (p page) line(pos int) int { return bytes.Count(p.source[:pos], []byte("\n")) + 1 }
