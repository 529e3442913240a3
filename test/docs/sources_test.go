// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package docs

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"
)

// The pages are compared with what the sources say of themselves: a message, reason, flag or metric is in a string of a
// form that is the same everywhere, so a new one that no page explains is found.

// source is a parsed Go file of the programs.
type source struct {
	path string // below the repository's root
	file *ast.File
}

// sources returns the Go files below directories of the repository, tests left out.
func sources(t *testing.T, dirs ...string) []source {
	t.Helper()
	var all []source
	for _, dir := range dirs {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			name, err := filepath.Rel(root, path)
			all = append(all, source{filepath.ToSlash(name), file})
			return err
		})
		require.NoError(t, err)
	}
	return all
}

// literal returns the value of a string constant in the source, also of one that is put together from several.
func literal(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind != token.STRING {
			return "", false
		}
		s, err := strconv.Unquote(e.Value)
		return s, err == nil
	case *ast.BinaryExpr:
		x, xOK := literal(e.X)
		y, yOK := literal(e.Y)
		return x + y, xOK && yOK
	case *ast.CallExpr:
		if name, _ := called(e); name == "Sprintf" {
			return literal(e.Args[0])
		}
	}
	return "", false
}

// called returns the name of a called function or method, and what it is called on.
func called(call *ast.CallExpr) (name, on string) {
	switch f := call.Fun.(type) {
	case *ast.Ident:
		return f.Name, ""
	case *ast.SelectorExpr:
		switch x := f.X.(type) {
		case *ast.Ident:
			on = x.Name
		case *ast.CallExpr:
			on, _ = called(x)
		}
		return f.Sel.Name, on
	}
	return "", ""
}

func readDocument(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, "Documentation", file))
	require.NoError(t, err)
	return string(data)
}

// requireExplained says that a page has each of the texts, which are keys with the file that they are from.
func requireExplained(t *testing.T, page string, texts map[string]string, least int) {
	t.Helper()
	require.Greater(t, len(texts), least, "they are found in the sources")
	content := readDocument(t, page)
	for text, from := range texts {
		if !strings.Contains(content, text) {
			t.Errorf("%s does not explain what %s says: %q", page, from, text)
		}
	}
}

// fragment returns the longest part of a format that is the same in each message, up to a semicolon.
func fragment(format string) string {
	longest := ""
	for _, part := range verb.Split(format, -1) {
		part, _, _ = strings.Cut(part, ";")
		part = strings.Trim(part, ` :,"()`)
		if len(part) > len(longest) {
			longest = part
		}
	}
	return longest
}

var verb = regexp.MustCompile(`%[-+# 0]*[\d.]*[a-zA-Z]`)

func TestFragment(t *testing.T) {
	require.Equal(t, "is gone: the node has no such device", fragment("request %q: device %.64s is gone: the node has no such device; try again"))
	require.Equal(t, "Waiting for the CustomResourceDefinition", fragment("Waiting for the CustomResourceDefinition %s to be installed"))
}

// TestLogMessages looks for each warning and error of agent and operator.
func TestLogMessages(t *testing.T) {
	found := map[string]string{}
	for _, s := range sources(t, "pkg/networkdriver", "pkg/client", "pkg/httpserver", "operator") {
		add := func(e ast.Expr) {
			if text, ok := literal(e); ok && text != "" && unicode.IsUpper(rune(text[0])) {
				found[fragment(text)] = s.path
			}
		}
		ast.Inspect(s.file, func(node ast.Node) bool {
			switch node := node.(type) {
			case *ast.CallExpr:
				switch name, _ := called(node); name {
				case "Warn", "Error", "Log", "report":
					for _, arg := range node.Args[:min(3, len(node.Args))] {
						add(arg)
					}
				}
			case *ast.AssignStmt:
				if name, ok := node.Lhs[0].(*ast.Ident); ok && name.Name == "message" && len(node.Rhs) == 1 {
					add(node.Rhs[0])
				}
			}
			return true
		})
	}
	requireExplained(t, "troubleshoot.md", found, 35)
}

// TestReasons looks for each reason of a condition, of an event, and of a failed publication.
func TestReasons(t *testing.T) {
	found := map[string]string{}
	for _, s := range sources(t, "api", "pkg/networkdriver", "operator") {
		ast.Inspect(s.file, func(node ast.Node) bool {
			switch node := node.(type) {
			case *ast.ValueSpec:
				if strings.HasPrefix(strings.ToLower(node.Names[0].Name), "reason") && len(node.Values) == 1 {
					if reason, ok := literal(node.Values[0]); ok {
						found["`"+reason+"`"] = s.path
					}
				}
			case *ast.CallExpr:
				if name, on := called(node); name == "Eventf" && on != "" {
					if reason, ok := literal(node.Args[3]); ok {
						found["`"+reason+"`"] = s.path
					}
				}
			}
			return true
		})
	}
	requireExplained(t, "troubleshoot.md", found, 25)
}

// TestErrors looks for the errors that end in an event of a pod, in the table of devices or in a condition. One that wraps
// another is explained by that.
func TestErrors(t *testing.T) {
	found := map[string]string{}
	for _, s := range sources(t, "pkg/networkdriver") {
		switch strings.TrimPrefix(s.path, "pkg/networkdriver/") {
		case "claims/prepare.go", "claims/params.go", "claims/writer.go", "attachments/attach.go", "attachments/claim.go",
			"attachments/outside.go", "attachments/room.go", "attachments/rows.go", "nri/hooks.go", "nri/connection.go", "podnet/mover.go", "sriov/device.go", "sriov/setup.go", "dra/server.go", "dra/driver.go":
		default:
			continue
		}
		ast.Inspect(s.file, func(node ast.Node) bool {
			if call, ok := node.(*ast.CallExpr); ok {
				name, on := called(call)
				if fmt.Sprint(on, ".", name) == "fmt.Errorf" || fmt.Sprint(on, ".", name) == "errors.New" {
					if text, ok := literal(call.Args[0]); ok && !strings.HasSuffix(text, ": %w") {
						found[fragment(text)] = s.path
					}
				}
			}
			return true
		})
	}
	requireExplained(t, "troubleshoot.md", found, 35)
}

// TestFlags looks for each flag of agent, operator and cilium-dbg.
func TestFlags(t *testing.T) {
	found := map[string]string{}
	for _, s := range sources(t, "cmd/cilium-agent", "cmd/cilium-operator", "cmd/cilium-dbg", "pkg", "operator") {
		ast.Inspect(s.file, func(node ast.Node) bool {
			call, ok := node.(*ast.CallExpr)
			if !ok {
				return true
			}
			name, on := called(call)
			if on != "flags" && on != "Flags" && on != "PersistentFlags" {
				return true
			}
			kind := strings.TrimSuffix(strings.TrimSuffix(name, "P"), "Var")
			switch kind {
			case "Bool", "String", "Int", "Duration", "Float32", "Float64":
				for _, arg := range call.Args {
					if flag, ok := literal(arg); ok {
						found["--"+flag] = s.path
						break
					}
				}
			}
			return true
		})
	}
	requireExplained(t, "reference.md", found, 20)
}

// TestMetrics looks for each metric of agent and operator.
func TestMetrics(t *testing.T) {
	found := map[string]string{}
	for _, s := range sources(t, "pkg/networkdriver", "operator") {
		if filepath.Base(s.path) != "metrics.go" {
			continue
		}
		prefix := "`"
		if strings.HasPrefix(s.path, "operator/") {
			prefix = "`operator_"
		}
		ast.Inspect(s.file, func(node ast.Node) bool {
			switch node := node.(type) {
			case *ast.KeyValueExpr:
				if key, ok := node.Key.(*ast.Ident); ok && key.Name == "Name" {
					if name, ok := literal(node.Value); ok {
						found[prefix+name+"`"] = s.path
					}
				}
			case *ast.CallExpr: // of a function that makes options of name and help
				if len(node.Args) == 2 {
					name, isName := literal(node.Args[0])
					if _, isHelp := literal(node.Args[1]); isName && isHelp {
						found[prefix+name+"`"] = s.path
					}
				}
			}
			return true
		})
	}
	requireExplained(t, "reference.md", found, 15)
}

var testName = regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w*`)

// TestNamesOfTests says that the tests which pages refer to are there.
func TestNamesOfTests(t *testing.T) {
	there := map[string]bool{}
	for _, dir := range []string{"api", "cmd", "operator", "pkg", "test", "tools"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(path, "_test.go") {
				return err
			}
			data, err := os.ReadFile(path)
			for line := range strings.Lines(string(data)) {
				if rest, ok := strings.CutPrefix(line, "func "); ok {
					there[testName.FindString(rest)] = true
				}
			}
			return err
		})
		require.NoError(t, err)
	}
	all, err := readPages(root)
	require.NoError(t, err)
	seen := 0
	for _, p := range all {
		for _, name := range testName.FindAllString(p.source, -1) {
			seen++
			if !there[name] {
				t.Errorf("%s: there is no %s", p.file, name)
			}
		}
	}
	require.Greater(t, seen, 150)
}
