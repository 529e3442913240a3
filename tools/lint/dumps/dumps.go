// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package dumps is an analyzer: nothing but pkg/rtlink lists links, addresses, routes or anything else of the kernel by
// itself, or subscribes to them. The kernel marks a dump that a change has interrupted, which is then asked for again; with
// one package that does it, nobody forgets.
package dumps

import (
	"go/ast"
	"go/types"
	"regexp"
	"strings"

	"golang.org/x/tools/go/analysis"
)

// Analyzer reports dumps in the programs' packages. Tests may dump: they look at the kernel independently.
var Analyzer = &analysis.Analyzer{
	Name: "dumps",
	Doc:  "report dumps of the kernel's tables outside pkg/rtlink",
	Run:  run,
}

const (
	module  = "github.com/cilium/networkdriver/"
	allowed = module + "pkg/rtlink"
	library = "github.com/vishvananda/netlink"
)

// product matches the paths of packages that the programs are made of.
var product = regexp.MustCompile(`^` + regexp.QuoteMeta(module) + `(pkg|cmd|operator)/`)

// listing matches the library's functions and methods that ask for more than one object, or subscribe. LinkByName and
// LinkByAlias dump only on kernels that are too old for the driver.
var listing = regexp.MustCompile(`List|Subscribe|Diag|^(BridgeVlanTunnelShow|DevlinkGetDeviceParams|LinkGetProtinfo|SocketGet)$`)

func run(pass *analysis.Pass) (any, error) {
	if path := pass.Pkg.Path(); !product.MatchString(path) || path == allowed {
		return nil, nil
	}
	for _, file := range pass.Files {
		if strings.HasSuffix(pass.Fset.File(file.FileStart).Name(), "_test.go") {
			continue
		}
		ast.Inspect(file, func(node ast.Node) bool {
			if name, ok := node.(*ast.Ident); ok && dumping(pass.TypesInfo.Uses[name]) {
				pass.Reportf(name.Pos(), "%s: nothing but pkg/rtlink dumps from the kernel, which asks again when a dump was interrupted", name.Name)
			}
			return true
		})
	}
	return nil, nil
}

// dumping is true for the flag of a dump, the library's listing functions, and what sends any request of the library's.
func dumping(object types.Object) bool {
	if object == nil || object.Pkg() == nil {
		return false
	}
	switch object := object.(type) {
	case *types.Const:
		return object.Name() == "NLM_F_DUMP"
	case *types.Func:
		switch object.Pkg().Path() {
		case library:
			return listing.MatchString(object.Name())
		case library + "/nl":
			return object.Name() == "Execute" || object.Name() == "ExecuteIter"
		}
	}
	return false
}
