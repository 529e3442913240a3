// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Names of the API group, its kinds and their plural resource names.
const (
	GroupName = "cilium.io"
	Version   = "v2alpha1"

	NodeConfigKind     = "CiliumNetworkDriverNodeConfig"
	NodeConfigResource = "ciliumnetworkdrivernodeconfigs"

	ClusterConfigKind     = "CiliumNetworkDriverClusterConfig"
	ClusterConfigResource = "ciliumnetworkdriverclusterconfigs"

	NetworkKind     = "CiliumNetworkDriverNetwork"
	NetworkResource = "ciliumnetworkdrivernetworks"

	AddressKind     = "CiliumNetworkDriverAddress"
	AddressResource = "ciliumnetworkdriveraddresses"
)

// SchemeGroupVersion is the group and version of the types in this package.
var SchemeGroupVersion = schema.GroupVersion{Group: GroupName, Version: Version}

// CiliumNode is Cilium's object for a node, of which only the metadata matter here.
const (
	CiliumNodeKind     = "CiliumNode"
	CiliumNodeResource = "ciliumnodes"
)

// CiliumNodeGroupVersion is the group and version of CiliumNodes.
var CiliumNodeGroupVersion = schema.GroupVersion{Group: GroupName, Version: "v2"}

// SchemeBuilder collects the functions that add this package's types to a
// scheme.
var SchemeBuilder = runtime.NewSchemeBuilder(addKnownTypes)

// AddToScheme adds this package's types to a scheme.
var AddToScheme = SchemeBuilder.AddToScheme

// Resource qualifies a resource name with the API group.
func Resource(resource string) schema.GroupResource {
	return SchemeGroupVersion.WithResource(resource).GroupResource()
}

func addKnownTypes(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(SchemeGroupVersion,
		&CiliumNetworkDriverNodeConfig{},
		&CiliumNetworkDriverNodeConfigList{},
		&CiliumNetworkDriverClusterConfig{},
		&CiliumNetworkDriverClusterConfigList{},
		&CiliumNetworkDriverNetwork{},
		&CiliumNetworkDriverNetworkList{},
		&CiliumNetworkDriverAddress{},
		&CiliumNetworkDriverAddressList{},
	)
	metav1.AddToGroupVersion(scheme, SchemeGroupVersion)
	return nil
}
