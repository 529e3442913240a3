// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package cdi is the gate before a claim's containers. Kubelet hands the runtime a CDI device for each request of a claim
// that a container lists, and a runtime refuses a container whose CDI device it cannot resolve. [Files] are what it
// resolves them by: a claim's file is there while the claim's devices are in a sandbox. So no such container starts
// without them, whether or not the agent is there to see it. Whether that sandbox is the container's own is told by the agent, or
// else by the hook of package gatehook, which the files have the runtime call.
package cdi

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"tags.cncf.io/container-device-interface/pkg/parser"
)

// class is that of the devices: together with the driver's name it makes their kind.
const class = "claim"

// markerPrefix begins the names of environment variables that say where a claim's devices are.
const markerPrefix = "NETWORKDRIVER_CLAIM_"

// ID is the CDI device of one request of a claim, request/subrequest included. Kubelet keeps it for as long as the claim
// is prepared, whichever devices and pods that is for in the end.
func ID(driver string, claim kubetypes.UID, request string) string {
	return parser.QualifiedName(vendor(driver), class, deviceName(claim, request))
}

// vendor is the driver's name, but for the first character, which CDI wants to be a letter.
func vendor(driver string) string {
	if driver != "" && '0' <= driver[0] && driver[0] <= '9' {
		return "dra." + driver
	}
	return driver
}

func deviceName(claim kubetypes.UID, request string) string {
	return string(claim) + "_" + resourceclaim.BaseRequestRef(request)
}

// Marker says in a container's environment which sandbox its claim's devices are in.
type Marker struct {
	Claim   kubetypes.UID
	Sandbox string
}

// variable is the marker as it stands in the environment. Its name differs between the claims of a pod.
func (m Marker) variable() string {
	sum := sha256.Sum256([]byte(m.Claim))
	return markerPrefix + strings.ToUpper(hex.EncodeToString(sum[:6])) + "=" + string(m.Claim) + "/" + m.Sandbox
}

// addressVariable is the name of the environment variable with the addresses of the devices of a request. For an extended resource,
// which alone has a slash in its name, it is that of the device plugin of the SR-IOV network operator; for a claim it differs in what
// comes after the prefix.
func addressVariable(podClaim, request string) string {
	name := podClaim
	if !strings.Contains(podClaim, "/") {
		name += "_" + request
	}
	return "PCIDEVICE_" + strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z':
			return r - 'a' + 'A'
		case 'A' <= r && r <= 'Z', '0' <= r && r <= '9':
			return r
		default:
			return '_'
		}
	}, name)
}

// MarkersIn returns the markers in a container's environment. Whoever writes the pod may write any.
func MarkersIn(environment []string) []Marker {
	var markers []Marker
	for _, variable := range environment {
		if !strings.HasPrefix(variable, markerPrefix) {
			continue
		}
		_, value, _ := strings.Cut(variable, "=")
		if claim, sandbox, ok := strings.Cut(value, "/"); ok {
			markers = append(markers, Marker{kubetypes.UID(claim), sandbox})
		}
	}
	return markers
}
