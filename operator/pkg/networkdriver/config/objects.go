// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// The operator has its own view of the two kinds: it takes a spec from one object to the other as it is, with fields that
// it does not know, and it never looks at the status of a node config, which can be long.

// clusterConfig is a CiliumNetworkDriverClusterConfig.
type clusterConfig struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              clusterConfigSpec                               `json:"spec"`
	Status            v2alpha1.CiliumNetworkDriverClusterConfigStatus `json:"status,omitzero"`
}

type clusterConfigSpec struct {
	NodeSelector *v2alpha1.LabelSelector `json:"nodeSelector,omitempty"`
	Spec         json.RawMessage         `json:"spec,omitempty"`
}

type clusterConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []clusterConfig `json:"items"`
}

// nodeConfig is a CiliumNetworkDriverNodeConfig.
type nodeConfig struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	// Spec is empty after trim.
	Spec json.RawMessage `json:"spec,omitempty"`

	// digest is that of the spec, from trim.
	digest digest
	// answers is the digest of the spec that the API server was given when it answered with this one. They differ when
	// it adds or drops fields on the way.
	answers digest
}

type nodeConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []nodeConfig `json:"items"`
}

// newScheme returns a scheme with the operator's view of its kinds.
func newScheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	for kind, object := range map[string]runtime.Object{
		v2alpha1.ClusterConfigKind: &clusterConfig{}, v2alpha1.ClusterConfigKind + "List": &clusterConfigList{},
		v2alpha1.NodeConfigKind: &nodeConfig{}, v2alpha1.NodeConfigKind + "List": &nodeConfigList{},
	} {
		scheme.AddKnownTypeWithName(v2alpha1.SchemeGroupVersion.WithKind(kind), object)
	}
	metav1.AddToGroupVersion(scheme, v2alpha1.SchemeGroupVersion)
	return scheme
}

// DeepCopyObject implements [runtime.Object].
func (c *clusterConfig) DeepCopyObject() runtime.Object {
	out := &clusterConfig{TypeMeta: c.TypeMeta}
	c.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	out.Spec = clusterConfigSpec{NodeSelector: c.Spec.NodeSelector.DeepCopy(), Spec: slices.Clone(c.Spec.Spec)}
	c.Status.DeepCopyInto(&out.Status)
	return out
}

// DeepCopyObject implements [runtime.Object].
func (l *clusterConfigList) DeepCopyObject() runtime.Object {
	out := &clusterConfigList{TypeMeta: l.TypeMeta, ListMeta: *l.ListMeta.DeepCopy()}
	for i := range l.Items {
		out.Items = append(out.Items, *l.Items[i].DeepCopyObject().(*clusterConfig))
	}
	return out
}

// DeepCopyObject implements [runtime.Object].
func (n *nodeConfig) DeepCopyObject() runtime.Object {
	out := &nodeConfig{TypeMeta: n.TypeMeta, Spec: slices.Clone(n.Spec), digest: n.digest, answers: n.answers}
	n.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	return out
}

// DeepCopyObject implements [runtime.Object].
func (l *nodeConfigList) DeepCopyObject() runtime.Object {
	out := &nodeConfigList{TypeMeta: l.TypeMeta, ListMeta: *l.ListMeta.DeepCopy()}
	for i := range l.Items {
		out.Items = append(out.Items, *l.Items[i].DeepCopyObject().(*nodeConfig))
	}
	return out
}

// digest stands for a spec. Specs with the same content have the same one.
type digest [16]byte

func (d digest) String() string { return hex.EncodeToString(d[:]) }

// digestOf returns the digest of a spec, whatever the order of its fields.
func digestOf(spec json.RawMessage) (digest, error) {
	var value any
	if len(spec) > 0 {
		decoder := json.NewDecoder(bytes.NewReader(spec))
		decoder.UseNumber()
		if err := decoder.Decode(&value); err != nil {
			return digest{}, err
		}
	}
	canonical, err := json.Marshal(value)
	if err != nil {
		return digest{}, err
	}
	sum := sha256.Sum256(canonical)
	return digest(sum[:len(digest{})]), nil
}

// selector returns the selector of nodes, which matches all of them when none is given.
func (c *clusterConfig) selector() (labels.Selector, error) {
	if c.Spec.NodeSelector == nil {
		return labels.Everything(), nil
	}
	return metav1.LabelSelectorAsSelector(c.Spec.NodeSelector.AsLabelSelector())
}

// lastValidSelector returns the last selector that was valid, from the status; nil when that is not known.
func (c *clusterConfig) lastValidSelector() labels.Selector {
	if c.Status.LastValidSelector == nil {
		return nil
	}
	selector, err := labels.Parse(*c.Status.LastValidSelector)
	if err != nil {
		return nil
	}
	return selector
}

// validate returns what is wrong with the config, or nil.
func (c *clusterConfig) validate() error {
	typed := v2alpha1.CiliumNetworkDriverClusterConfig{
		ObjectMeta: metav1.ObjectMeta{Name: c.Name},
		Spec:       v2alpha1.CiliumNetworkDriverClusterConfigSpec{NodeSelector: c.Spec.NodeSelector},
	}
	if err := json.Unmarshal(c.Spec.Spec, &typed.Spec.Spec); err != nil {
		return fmt.Errorf("spec.spec: %w", err)
	}
	typed.Spec.Spec.Default()
	return typed.Validate()
}

// trim drops what is not compared from a node config, and replaces the spec by its digest. Doing so again changes
// nothing: an informer may transform an object twice.
func (n *nodeConfig) trim() error {
	if n.digest != (digest{}) {
		return nil
	}
	var err error
	if n.digest, err = digestOf(n.Spec); err != nil {
		return fmt.Errorf("spec of %s %s: %w", v2alpha1.NodeConfigKind, n.Name, err)
	}
	n.Spec = nil
	n.ObjectMeta = metav1.ObjectMeta{
		Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion, Generation: n.Generation,
		CreationTimestamp: n.CreationTimestamp, DeletionTimestamp: n.DeletionTimestamp,
		Labels:      only(n.Labels, v2alpha1.LabelManagedBy),
		Annotations: only(n.Annotations, v2alpha1.AnnotationClusterConfig),
	}
	return nil
}

// only returns the map with these keys alone. The result is nil only for a nil map.
func only(m map[string]string, key string) map[string]string {
	if m == nil {
		return nil
	}
	if value, ok := m[key]; ok {
		return map[string]string{key: value}
	}
	return map[string]string{}
}

// generated says whether the operator has made the node config, or has taken it over.
func (n *nodeConfig) generated() bool {
	return n.Labels[v2alpha1.LabelManagedBy] == v2alpha1.ManagedByOperator
}

// clusterConfig is the name of the cluster config that it was made from.
func (n *nodeConfig) clusterConfig() string { return n.Annotations[v2alpha1.AnnotationClusterConfig] }

// is says whether the node config is as the cluster config wants it.
func (n *nodeConfig) is(clusterConfig string, spec digest) bool {
	return n.generated() && n.clusterConfig() == clusterConfig && (n.digest == spec || n.answers == spec)
}

// transformNodeConfig trims what enters the cache.
func transformNodeConfig(object any) (any, error) {
	if n, ok := object.(*nodeConfig); ok {
		if err := n.trim(); err != nil {
			return nil, err
		}
	}
	return object, nil
}

// transformClusterConfig drops from what enters the cache the records of who set which field.
func transformClusterConfig(object any) (any, error) {
	if c, ok := object.(*clusterConfig); ok {
		c.ManagedFields, c.Annotations = nil, nil
	}
	return object, nil
}

// transformCiliumNode drops from what enters the cache everything but the labels.
func transformCiliumNode(object any) (any, error) {
	if n, ok := object.(*metav1.PartialObjectMetadata); ok {
		n.ObjectMeta = metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion, Labels: n.Labels}
	}
	return object, nil
}
