// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package crds holds the network driver's CustomResourceDefinitions, as
// generated from the types in api/v2alpha1.
package crds

import (
	"context"
	"embed"
	"fmt"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/typed/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/yaml"
)

// fieldManager owns the fields that Install sets.
const fieldManager = "cilium-network-driver"

//go:embed *.yaml
var files embed.FS

// Objects returns the definitions, in the order of their names. The caller may
// change them.
func Objects() []*apiextensionsv1.CustomResourceDefinition {
	var objects []*apiextensionsv1.CustomResourceDefinition
	for _, manifest := range manifests() {
		object := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(manifest, object); err != nil {
			panic(fmt.Sprintf("embedded CustomResourceDefinition: %v", err))
		}
		objects = append(objects, object)
	}
	return objects
}

// Install brings the cluster's definitions to what this program was built
// with, by server-side apply, and returns when the API server serves them.
func Install(ctx context.Context, client apiextensionsclient.CustomResourceDefinitionsGetter) error {
	definitions := client.CustomResourceDefinitions()
	force := true
	objects := Objects()
	for i, manifest := range manifests() {
		name := objects[i].Name
		_, err := definitions.Patch(ctx, name, types.ApplyYAMLPatchType, manifest, metav1.PatchOptions{
			FieldManager: fieldManager,
			Force:        &force,
		})
		if err != nil {
			return fmt.Errorf("applying CustomResourceDefinition %s: %w", name, err)
		}
	}
	for _, object := range objects {
		if err := waitEstablished(ctx, definitions, object.Name); err != nil {
			return err
		}
	}
	return nil
}

func waitEstablished(ctx context.Context, definitions apiextensionsclient.CustomResourceDefinitionInterface, name string) error {
	var last error
	err := wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		object, err := definitions.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			last = err
			return false, nil
		}
		for _, condition := range object.Status.Conditions {
			switch {
			case condition.Type == apiextensionsv1.NamesAccepted && condition.Status == apiextensionsv1.ConditionFalse:
				return false, fmt.Errorf("names refused: %s", condition.Message)
			case condition.Type == apiextensionsv1.Established && condition.Status == apiextensionsv1.ConditionTrue:
				return true, nil
			}
		}
		return false, nil
	})
	if err != nil && last != nil {
		err = fmt.Errorf("%w (last error: %w)", err, last)
	}
	if err != nil {
		return fmt.Errorf("waiting for CustomResourceDefinition %s to be established: %w", name, err)
	}
	return nil
}

func manifests() [][]byte {
	entries, err := files.ReadDir(".")
	if err != nil {
		panic(fmt.Sprintf("embedded files: %v", err))
	}
	var manifests [][]byte
	for _, entry := range entries {
		manifest, err := files.ReadFile(entry.Name())
		if err != nil {
			panic(fmt.Sprintf("embedded file %s: %v", entry.Name(), err))
		}
		manifests = append(manifests, manifest)
	}
	return manifests
}
