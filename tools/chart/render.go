// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package chart renders the project's Helm chart with Helm's own library, as `helm install` would.
package chart

import (
	"cmp"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/loader/archive"
	chartv2 "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	chartutil "helm.sh/helm/v4/pkg/chart/v2/util"
	"helm.sh/helm/v4/pkg/engine"
	releaseutil "helm.sh/helm/v4/pkg/release/v1/util"
	"k8s.io/client-go/rest"

	"github.com/cilium/networkdriver/install/helm"
)

// Options say for what the chart is rendered. Their zero value is good for a new release as the documentation has it.
type Options struct {
	// Release is the release's name, network-driver by default.
	Release string
	// Namespace is kube-system by default.
	Namespace string
	// Kubernetes is the cluster's version, v1.34.0 by default.
	Kubernetes string
	// Upgrade says that the release exists already.
	Upgrade bool
	// Cluster is what templates look objects up in. Nil: they find none, as in helm template.
	Cluster *rest.Config
}

// Rendered is what came of the chart.
type Rendered struct {
	// Manifests has a YAML document for each object, in the order in which Helm installs them.
	Manifests []string
	// Notes is what Helm prints in the end.
	Notes string
}

// YAML returns the documents as one stream.
func (r *Rendered) YAML() []byte {
	var b strings.Builder
	for _, m := range r.Manifests {
		b.WriteString("---\n" + strings.TrimPrefix(strings.TrimSpace(m), "---\n") + "\n")
	}
	return []byte(b.String())
}

// Load returns the chart.
func Load() (*chartv2.Chart, error) {
	var files []*archive.BufferedFile
	err := fs.WalkDir(helm.Chart, helm.Name, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		data, err := fs.ReadFile(helm.Chart, name)
		if err != nil {
			return err
		}
		files = append(files, &archive.BufferedFile{Name: strings.TrimPrefix(name, helm.Name+"/"), Data: data})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("load chart: %w", err)
	}
	return loader.LoadFiles(files)
}

// Render renders the chart with values over its defaults, and checks them against the schema first.
func Render(values map[string]any, opts Options) (*Rendered, error) {
	c, err := Load()
	if err != nil {
		return nil, err
	}
	caps := common.DefaultCapabilities.Copy()
	version, err := common.ParseKubeVersion(cmp.Or(opts.Kubernetes, "v1.34.0"))
	if err != nil {
		return nil, err
	}
	caps.KubeVersion = *version
	if !chartutil.IsCompatibleRange(c.Metadata.KubeVersion, version.String()) {
		return nil, fmt.Errorf("chart requires kubeVersion: %s which is incompatible with Kubernetes %s", c.Metadata.KubeVersion, version)
	}
	top, err := util.ToRenderValues(c, values, common.ReleaseOptions{
		Name: cmp.Or(opts.Release, "network-driver"), Namespace: cmp.Or(opts.Namespace, "kube-system"),
		IsInstall: !opts.Upgrade, IsUpgrade: opts.Upgrade, Revision: 1,
	}, caps)
	if err != nil {
		return nil, err
	}
	renderer := engine.Engine{}
	if opts.Cluster != nil {
		renderer = engine.New(opts.Cluster)
	}
	files, err := renderer.Render(c, top)
	if err != nil {
		return nil, err
	}
	rendered := &Rendered{}
	notes := path.Join(c.Name(), "templates/NOTES.txt")
	rendered.Notes = strings.TrimSpace(files[notes])
	delete(files, notes)
	_, manifests, err := releaseutil.SortManifests(files, caps.APIVersions, releaseutil.InstallOrder)
	if err != nil {
		return nil, err
	}
	for _, m := range manifests {
		rendered.Manifests = append(rendered.Manifests, m.Content)
	}
	return rendered, nil
}
