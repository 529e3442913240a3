// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package crdcompat

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/Masterminds/semver/v3"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

// Deliberate is a break that is meant, with the reason that stands in the release's notes.
type Deliberate struct {
	// From is the last release that does not have it, such as v0.1.0.
	From   string `json:"from"`
	Break  `json:",inline"`
	Reason string `json:"reason"`
}

// Check compares the definitions in each directory of released, which has the name of a version, with those of the next one, and the last
// one's with the present ones. The error names each break that deliberate, a YAML list in a file, does not have, and whatever is in
// that list without a reason or without being a break.
func Check(released, present, deliberate string) error {
	versions, err := versionsIn(released)
	if err != nil {
		return err
	}
	var meant []Deliberate
	data, err := os.ReadFile(deliberate)
	if err == nil {
		err = yaml.UnmarshalStrict(data, &meant)
	}
	if err != nil {
		return fmt.Errorf("read the breaks that are meant: %w", err)
	}
	var wrong []error
	met := make([]bool, len(meant))
	for i, version := range versions {
		next, name := present, "the working tree"
		if i+1 < len(versions) {
			next, name = filepath.Join(released, versions[i+1]), versions[i+1]
		}
		former, err := Load(filepath.Join(released, version))
		if err != nil {
			return err
		}
		now, err := Load(next)
		if err != nil {
			return err
		}
		for _, b := range Compare(former, now) {
			at := slices.IndexFunc(meant, func(d Deliberate) bool { return d.From == version && d.Break == b })
			if at < 0 {
				wrong = append(wrong, fmt.Errorf("%s breaks %s: %v", name, version, b))
			} else {
				met[at] = true
			}
		}
	}
	for i, d := range meant {
		switch {
		case !met[i]:
			wrong = append(wrong, fmt.Errorf("%s: this is no break since %s: %v", deliberate, d.From, d.Break))
		case d.Reason == "":
			wrong = append(wrong, fmt.Errorf("%s: a break without a reason: %v", deliberate, d.Break))
		}
	}
	return errors.Join(wrong...)
}

// versionsIn returns the names of the directories in the order of their versions.
func versionsIn(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read the released definitions: %w", err)
	}
	var versions []*semver.Version
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		v, err := semver.StrictNewVersion(strings.TrimPrefix(e.Name(), "v"))
		if err != nil {
			return nil, fmt.Errorf("released definitions %s: %w", filepath.Join(dir, e.Name()), err)
		}
		versions = append(versions, v)
	}
	if len(versions) == 0 {
		return nil, fmt.Errorf("%s has no released definitions", dir)
	}
	slices.SortFunc(versions, (*semver.Version).Compare)
	var names []string
	for _, v := range versions {
		names = append(names, "v"+v.Original())
	}
	return names, nil
}

// Load returns the definitions in the YAML files of a directory, in the order of the files' names.
func Load(dir string) ([]*apiextensionsv1.CustomResourceDefinition, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s has no definitions", dir)
	}
	var crds []*apiextensionsv1.CustomResourceDefinition
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(data, crd); err != nil {
			return nil, fmt.Errorf("definition in %s: %w", file, err)
		}
		crds = append(crds, crd)
	}
	return crds, nil
}
