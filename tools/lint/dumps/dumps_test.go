// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dumps

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/tools/go/analysis/analysistest"
)

func TestAnalyzer(t *testing.T) {
	analysistest.Run(t, analysistest.TestData(), Analyzer, module+"...")
}

// TestListing says that the analyzer knows each function of the library that dumps by itself.
func TestListing(t *testing.T) {
	list := exec.CommandContext(t.Context(), "go", "list", "-f", "{{.Dir}}", library)
	list.Dir = "../../.." // the driver's module requires it
	dir, err := list.Output()
	require.NoError(t, err)
	files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(dir)), "*_linux.go"))
	require.NoError(t, err)
	seen := 0
	for _, path := range files {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, decl := range file.Decls {
			function, ok := decl.(*ast.FuncDecl)
			if !ok || !function.Name.IsExported() {
				continue
			}
			ast.Inspect(function, func(node ast.Node) bool {
				if name, ok := node.(*ast.Ident); ok && name.Name == "NLM_F_DUMP" {
					seen++
					require.Regexp(t, listing, function.Name.Name, path)
				}
				return true
			})
		}
	}
	require.Greater(t, seen, 20)
}
