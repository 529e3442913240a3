// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"bytes"
	"cmp"
	"debug/buildinfo"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	spdx "github.com/spdx/tools-golang/spdx/v2/v2_3"
)

const (
	product     = "cilium-network-driver"
	home        = "https://github.com/cilium/networkdriver"
	noAssertion = "NOASSERTION"
)

// writeSBOM writes the bill of materials: the programs of all platforms, and the modules that each has in it by its own word.
func (s *source) writeSBOM(programs, dir string) error {
	doc, err := s.sbom(programs)
	if err != nil {
		return fmt.Errorf("bill of materials: %w", err)
	}
	var out bytes.Buffer
	if err := spdxjson.Write(doc, &out, spdxjson.Indent("  ")); err != nil {
		return fmt.Errorf("bill of materials: %w", err)
	}
	return os.WriteFile(filepath.Join(dir, product+"-"+s.version+".spdx.json"), out.Bytes(), 0o644)
}

func (s *source) sbom(programs string) (*spdx.Document, error) {
	files, err := filepath.Glob(filepath.Join(programs, "*", "*"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s has no programs: build them first", programs)
	}
	release := newPackage(product, s.version)
	release.PackageHomePage, release.PackageSourceInfo = home, "commit "+s.revision
	release.PackageLicenseDeclared = "Apache-2.0"
	doc := &spdx.Document{
		SPDXVersion: spdx.Version, DataLicense: spdx.DataLicense, SPDXIdentifier: "DOCUMENT",
		DocumentName:      product + "-" + s.version,
		DocumentNamespace: home + "/spdx/" + s.version + "-" + s.revision,
		CreationInfo: &spdx.CreationInfo{
			Created: s.time.Format(time.RFC3339),
			Creators: []common.Creator{
				{CreatorType: "Organization", Creator: "Authors of Cilium"},
				{CreatorType: "Tool", Creator: product + "-release"},
			},
		},
		Packages: []*spdx.Package{release},
	}
	relate := func(a common.ElementID, relationship string, b common.ElementID) {
		doc.Relationships = append(doc.Relationships, &spdx.Relationship{
			RefA: common.DocElementID{ElementRefID: a}, Relationship: relationship, RefB: common.DocElementID{ElementRefID: b},
		})
	}
	relate(doc.SPDXIdentifier, common.TypeRelationshipDescribe, release.PackageSPDXIdentifier)
	modules := map[common.ElementID]*spdx.Package{}
	for _, file := range files {
		info, err := buildinfo.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("what %s was built from: %w", file, err)
		}
		sum, err := digest(file)
		if err != nil {
			return nil, err
		}
		name := path.Join(filepath.Base(filepath.Dir(file)), filepath.Base(file))
		program := newPackage(name, s.version)
		program.PackageFileName = name
		program.PrimaryPackagePurpose = "APPLICATION"
		program.PackageLicenseDeclared = "Apache-2.0"
		program.PackageChecksums = []common.Checksum{{Algorithm: common.SHA256, Value: sum}}
		doc.Packages = append(doc.Packages, program)
		relate(release.PackageSPDXIdentifier, common.TypeRelationshipContains, program.PackageSPDXIdentifier)
		for _, m := range modulesOf(info) {
			known := modules[m.PackageSPDXIdentifier]
			if known != nil && (known.PackageName != m.PackageName || known.PackageVersion != m.PackageVersion) {
				return nil, fmt.Errorf("modules %s and %s would have one identifier", known.PackageName, m.PackageName)
			}
			modules[m.PackageSPDXIdentifier] = m
			relate(program.PackageSPDXIdentifier, common.TypeRelationshipDependsOn, m.PackageSPDXIdentifier)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(modules)) {
		doc.Packages = append(doc.Packages, modules[id])
	}
	return doc, nil
}

// modulesOf returns Go's own packages as one module, and those that the program was built from besides the project's.
func modulesOf(info *buildinfo.BuildInfo) []*spdx.Package {
	modules := []*spdx.Package{newModule(&debug.Module{Path: "stdlib", Version: strings.TrimPrefix(info.GoVersion, "go")})}
	for _, m := range info.Deps {
		modules = append(modules, newModule(cmp.Or(m.Replace, m)))
	}
	return modules
}

func newModule(m *debug.Module) *spdx.Package {
	p := newPackage(m.Path, m.Version)
	if m.Sum != "" {
		p.PackageSourceInfo = "go.sum " + m.Sum
	}
	p.PackageExternalReferences = []*spdx.PackageExternalReference{{
		Category: common.CategoryPackageManager, RefType: common.TypePackageManagerPURL,
		// Names of Go modules are in lower case there.
		Locator: "pkg:golang/" + strings.ToLower(m.Path) + "@" + strings.ReplaceAll(url.PathEscape(m.Version), "+", "%2B"),
	}}
	return p
}

// notInID is what identifiers are not made of.
var notInID = regexp.MustCompile(`[^A-Za-z0-9.]+`)

func newPackage(name, version string) *spdx.Package {
	return &spdx.Package{
		PackageName: name, PackageVersion: version,
		PackageSPDXIdentifier:   common.ElementID("Package-" + notInID.ReplaceAllString(name+"-"+version, "-")),
		PackageDownloadLocation: noAssertion, PackageCopyrightText: noAssertion,
		PackageLicenseConcluded: noAssertion, PackageLicenseDeclared: noAssertion,
	}
}
