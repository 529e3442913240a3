// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// ConditionConflicting is True on a cluster config that also selects a
	// node which an older one occupies. Such a config configures no node. What
	// it made before, for nodes that it still selects and that no other one
	// governs, stays as it is.
	ConditionConflicting = "cilium.io/ConflictingClusterConfiguration"

	// ReasonConfigurationConflict is the reason of a True
	// ConditionConflicting.
	ReasonConfigurationConflict = "configurationConflict"

	// LabelManagedBy marks the node configs that the operator has made, with
	// ManagedByOperator as its value. It deletes no others.
	LabelManagedBy = "networkdriver.cilium.io/managed-by"

	// ManagedByOperator is the value of LabelManagedBy.
	ManagedByOperator = "cilium-operator"

	// AnnotationClusterConfig names the cluster config from which a node config
	// was made. It is no owner reference, with which the node config would be
	// collected as garbage before another cluster config can take it over.
	AnnotationClusterConfig = "networkdriver.cilium.io/cluster-config"
)

// +kubebuilder:object:root=true
// +kubebuilder:resource:categories={cilium},scope=Cluster,path=ciliumnetworkdriverclusterconfigs,singular=ciliumnetworkdriverclusterconfig,shortName=ndcc
// +kubebuilder:subresource:status
// +kubebuilder:storageversion
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="Whether all nodes it governs are configured"
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Why it is ready, or why not"
// +kubebuilder:printcolumn:name="Conflict",type=string,JSONPath=`.status.conditions[?(@.type=="cilium.io/ConflictingClusterConfiguration")].status`,description="Whether an older cluster config occupies one of its nodes"
// +kubebuilder:printcolumn:name="Matched",type=integer,JSONPath=`.status.matchedNodes`,description="Nodes that the selector matches"
// +kubebuilder:printcolumn:name="Configured",type=integer,JSONPath=`.status.configuredNodes`,description="Nodes that this config configures"
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].message`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`

// CiliumNetworkDriverClusterConfig configures the network driver of all nodes
// that its selector matches: the operator makes a
// CiliumNetworkDriverNodeConfig for each of them.
//
// A node is governed by one cluster config only. Where several match, the one
// that was created first wins, then the one whose name comes first; every
// other one that matches the node is in conflict and configures no node. What
// it made before stays as it is where no other one governs the node.
type CiliumNetworkDriverClusterConfig struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what the nodes shall offer.
	//
	// +required
	Spec CiliumNetworkDriverClusterConfigSpec `json:"spec"`

	// status is written by the operator.
	//
	// +optional
	Status CiliumNetworkDriverClusterConfigStatus `json:"status,omitzero"`
}

// +kubebuilder:object:root=true

// CiliumNetworkDriverClusterConfigList is a list of cluster configs.
type CiliumNetworkDriverClusterConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []CiliumNetworkDriverClusterConfig `json:"items"`
}

// CiliumNetworkDriverClusterConfigSpec selects nodes and says how to configure
// them.
type CiliumNetworkDriverClusterConfigSpec struct {
	// nodeSelector selects nodes by the labels of their CiliumNode objects.
	// Left out or empty it matches every node.
	//
	// +optional
	NodeSelector *LabelSelector `json:"nodeSelector,omitempty"`

	// spec becomes the spec of the node configs, as it is.
	//
	// +required
	Spec CiliumNetworkDriverNodeConfigSpec `json:"spec"`
}

// CiliumNetworkDriverClusterConfigStatus is what the operator has made of the
// cluster config.
type CiliumNetworkDriverClusterConfigStatus struct {
	// observedGeneration is the generation of the object of which the status
	// speaks.
	//
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// conditions are the cluster config's conditions: Ready and
	// cilium.io/ConflictingClusterConfiguration.
	//
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// matchedNodes is the number of nodes that the selector matches.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	MatchedNodes int32 `json:"matchedNodes"`

	// configuredNodes is the number of nodes whose node config is as this
	// cluster config wants it: in the end all that it matches, or none when it
	// is in conflict.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	ConfiguredNodes int32 `json:"configuredNodes"`

	// frozenNodes is the number of nodes whose node config was made from this
	// cluster config and stays as it is, as this one is in conflict or invalid,
	// or as the node's CiliumNode is missing.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	FrozenNodes int32 `json:"frozenNodes"`

	// lastValidSelector is the last node selector that was valid, as kubectl
	// writes selectors; empty for all nodes. While the cluster config is
	// invalid, node configs of the nodes that it matches stay.
	//
	// +optional
	LastValidSelector *string `json:"lastValidSelector,omitempty"`
}
